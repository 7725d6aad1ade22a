"""Train a small hybrid of Qwen3.5's kind (gated delta net) on the standard library.

    python examples/pycode/hybrid.py --minutes 25 --output hybrid
    jetdraft train eagle hybrid --kind mtp --data hybrid/texts.txt --unrolled 3 \
        --steps 300 --sequence-length 257 --learning-rate 4e-3 --half -o hybrid-mtp
    jetdraft export hybrid --head hybrid-mtp -o bundles/hybrid
    jetdraft bench bundles/hybrid --prompts examples/pycode/prompts.jsonl

The repository does not keep the trained weights. The texts are those of `train.py`,
without the held-out files.
"""

from functools import partial
from pathlib import Path

import click
import corpus
import torch
import train
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

SIZES = {
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 6,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
TEXT_FILES = 400
"""Files of the corpus that the head's training reads."""


@click.command()
@click.option("--minutes", default=25.0, show_default=True)
@click.option("--seed", default=7, show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), required=True)
def main(minutes: float, seed: int, threads: int, output: Path) -> None:
    """Train the hybrid; writes its checkpoint and the texts for its head."""
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    output.mkdir(parents=True, exist_ok=True)
    texts = list(corpus.read()[0].values())
    tokenizer = corpus.train_tokenizer(texts)
    stream = corpus.encode(tokenizer, texts)
    config = Qwen3_5TextConfig(
        **SIZES,
        vocab_size=corpus.VOCABULARY,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    model = Qwen3_5ForCausalLM(config)
    click.echo(f"{sum(weight.numel() for weight in model.parameters())} weights")
    stage = train.Stage("hybrid", 60 * minutes, 4e-3, output)
    batches = partial(train.corpus_batches, stream, seed)
    steps = train.fit(model, stage, train.label_loss, batches)
    train.save(model, tokenizer, output)
    stage.path.unlink()
    (output / "texts.txt").write_text("\n\n".join(texts[:TEXT_FILES]), "utf-8")
    click.echo(f"{steps} steps")


if __name__ == "__main__":
    main()
