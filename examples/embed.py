"""Text as it comes, and what of it had been drafted.

python examples/embed.py [BUNDLE [PROMPT]]
"""

import sys

import jetdraft
from jetdraft.testing import toy_bundle

bundle = sys.argv[1] if len(sys.argv) > 1 else toy_bundle()
prompt = sys.argv[2] if len(sys.argv) > 2 else "The robot sees"

with jetdraft.load(bundle) as model:
    stream = model.stream(prompt, max_new_tokens=64)
    print(prompt, end="")
    for piece in stream:
        print(piece.text, end="", flush=True)
    result = stream.result()

print("\n" + "".join("+" if drafted else "." for drafted in result.from_draft))
print(f"{sum(result.from_draft)} of {len(result.token_ids)} tokens had been drafted")
