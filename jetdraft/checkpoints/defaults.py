"""The fields by which a checkpoint chooses its text, and what becomes of them."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, cast

import transformers

from jetdraft.bundle import Defaults
from jetdraft.errors import CheckpointError, OptionError, as_error, printable
from jetdraft.parsing import RecordError, read_json_file, read_record
from jetdraft.runtime.sampling.chooser import Sampling
from jetdraft.runtime.sampling.processors import Penalties

KEPT, NO_TEXT = "honoured", "changes no text"
WARNED, REFUSED = "warned of", "refused"
MAX_VALUE_LETTERS = 60  # The most characters of a value that a warning shows.


def neutral(*values: Any) -> Callable[[Any], bool]:
    """Return a test for values that change no text: None, empty, or in `values`."""
    return lambda value: value in (None, "", [], {}, ()) or value in values


@dataclass(frozen=True)
class Rule:
    """A rule for fields `names`, split by spaces: a fate, and why unless `neutral`."""

    names: str
    fate: str
    why: str
    neutral: Callable[[Any], bool]


_FATES = "|".join((KEPT, NO_TEXT, WARNED, REFUSED))
_RULE = re.compile(rf"^([^:]+): ({_FATES})(?: unless ([^:]+))?: (.+)$")
_NEUTRAL: dict[str, Callable[[Any], bool]] = {
    "": neutral(),
    "words of one token": lambda words: all(len(word) == 1 for word in words or ()),
    "the model's": lambda value: True,  # the reader compares it with the model's
}


def read_rules(table: str) -> tuple[Rule, ...]:
    """Read rows of a table; further lines of a row are indented.

    top_k min_p: honoured: the options of these names
    split.count: refused unless 0, 1: the parts must be joined
    """
    rules = []
    for row in re.split(r"\n(?=\S)", table.strip()):
        [(names, fate, unless, why)] = _RULE.findall(" ".join(row.split()))
        test = _NEUTRAL.get(unless) or neutral(*json.loads(f"[{unless}]"))
        rules.append(Rule(names, fate, why, test))
    return tuple(rules)


# Rules for generation_config.json, or for config.json where that is missing.
GENERATION_FIELDS = read_rules("""
do_sample temperature top_k top_p min_p: honoured: greedy unless `do_sample`; then the
    temperature is 1 and `top_k` 50 where the file has none, as in transformers
repetition_penalty: honoured: the option of this name
stop_strings: honoured: the option `stop`
eos_token_id: honoured: all of them end a text
suppress_tokens: honoured: the option `logit_bias`, which takes them out
bad_words_ids: warned of unless words of one token: words of several tokens; words of
    one token are honoured as `logit_bias`
num_beams: warned of unless 1: there is no beam search: the text is the one of a single
    beam
early_stopping length_penalty num_beam_groups diversity_penalty: changes no text: only
    beams have it
max_length: warned of unless 20: `--max-new-tokens` and `--capacity` say how long a text
    is
max_new_tokens max_time: warned of: `--max-new-tokens` and `max_seconds` say how long a
    text is
min_length min_new_tokens exponential_decay_length_penalty: warned of unless 0: a text
    may end at any token
no_repeat_ngram_size encoder_no_repeat_ngram_size: warned of unless 0: the text may
    repeat; see `repetition_penalty`
encoder_repetition_penalty guidance_scale: warned of unless 1: no option does this
sequence_bias penalty_alpha dola_layers constraints force_words_ids watermarking_config
    token_healing: warned of unless false: no option does this
top_h typical_p epsilon_cutoff eta_cutoff: changes no text: without `do_sample` nothing
    is filtered
begin_suppress_tokens forced_bos_token_id forced_eos_token_id: warned of: no token is
    forced or forbidden at one place only
renormalize_logits remove_invalid_values: changes no text: the order stays
bos_token_id pad_token_id decoder_start_token_id: changes no text: the tokenizer or the
    chat template begins a text, and nothing is padded
use_cache cache_implementation cache_config max_cache_len prefill_chunk_size
    compile_config disable_compile continuous_batching_config low_memory
    return_legacy_cache: changes no text: how transformers computes; a bundle has its
    own KV buffers
is_assistant use_mtp num_assistant_tokens num_assistant_tokens_schedule
    assistant_confidence_threshold prompt_lookup_num_tokens max_matching_ngram_size
    assistant_early_exit assistant_lookbehind target_lookbehind
    assistant_ensemble_weight speculation_type: changes no text: how transformers
    drafts; drafts change no text here
num_return_sequences output_attentions output_hidden_states output_scores output_logits
    return_dict_in_generate: changes no text: what a call gives back beside the text
transformers_version _from_model_config _commit_hash generation_kwargs: changes no text:
    where the file comes from
""")
# Rules for files with `do_sample`; they override `GENERATION_FIELDS`.
SAMPLING_FIELDS = read_rules("""
top_h typical_p epsilon_cutoff eta_cutoff: warned of unless 0, 1: sampling has no such
    filter
""")
# Rules for encoder-decoders; they override `GENERATION_FIELDS`.
SOURCE_FIELDS = read_rules("""
decoder_start_token_id forced_bos_token_id: honoured: a text begins with them
""")
SPEECH_FIELDS = read_rules("""
no_timestamps_token_id lang_to_id task_to_id suppress_tokens begin_suppress_tokens
    max_initial_timestamp_index: honoured: the rules of a transcript
language task return_timestamps: warned of unless "transcribe", false, true: `jetdraft
    transcribe` takes the language, or detects it
stop_strings: warned of: a transcript has no stop texts
max_length max_new_tokens forced_decoder_ids is_multilingual alignment_heads
    prev_sot_token_id median_filter_width: changes no text: windows have their own
    length and beginning, and words no times
""")


def rules_by_name(*tables: tuple[Rule, ...]) -> dict[str, Rule]:
    """Map names of fields to rules; a later table overrides an earlier table."""
    rules = [rule for table in tables for rule in table]
    return {name: rule for rule in rules for name in rule.names.split()}


def find_rule(name: str, rules: Mapping[str, Rule]) -> Rule | None:
    """Return a field's rule, by its name or a prefix such as "general.*"; or None."""
    prefixes = (p for p in rules if p.endswith("*") and name.startswith(p[:-1]))
    return rules.get(name) or rules.get(next(prefixes, ""))


def passed_over_fields(
    file: str, fields: Mapping[str, Any], rules: Mapping[str, Rule]
) -> Iterator[str]:
    """Yield a warning line for each field that the `rules` warn of."""
    for name, value in fields.items():
        rule = find_rule(name, rules) or _UNKNOWN_FIELD
        if rule.fate == WARNED and not rule.neutral(value):
            yield f"{file}: {name} {printable(value, MAX_VALUE_LETTERS)}: {rule.why}"


_UNKNOWN_FIELD = Rule("", WARNED, "this version does not know it", neutral())

FILE, CONFIG = "generation_config.json", "config.json"
NEVER_BIAS = -1e30  # The logit bias of a token that must never be chosen.
_SAMPLING = ("temperature", "top_p", "top_k", "min_p")


def read_fields(source: str, name: str, kind: Any = dict) -> Any:
    """Read a JSON `kind` of a folder or hub id; None without it; `CheckpointError`."""
    file = transformers.utils.cached_file(
        source, name, _raise_exceptions_for_missing_entries=False
    )
    fact, fix = f"{name} of {source} cannot be read", "fetch it again"
    with as_error(CheckpointError, (OSError, ValueError, TypeError), fact, fix):
        # Configs of Mamba layers may have an `Infinity`.
        return None if file is None else kind(read_json_file(Path(file), infinite=True))


@dataclass(frozen=True)
class GenerationFields:
    """The fields by which a checkpoint configures generation, and their file."""

    source: str
    file: str = FILE
    fields: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, source: str) -> Self:
        """Read the fields of a folder or hub id; raises `CheckpointError`."""
        fields, file = read_fields(source, FILE), FILE
        if fields is None:
            config, _ = transformers.PreTrainedConfig.get_config_dict(source)
            rules = rules_by_name(GENERATION_FIELDS)
            fields = {name: value for name, value in config.items() if name in rules}
            file = CONFIG
        generation = cls(source, file, fields)
        generation.defaults()  # refuses bad values before any weight is read
        return generation

    def defaults(
        self, vocab_size: int = 0, ends: Iterable[int] = (), is_speech: bool = False
    ) -> Defaults:
        """Return the options that the fields stand for; raises `CheckpointError`.

        Ids from `vocab_size` on, and bad words in `ends`, are not forbidden.
        """
        fields, options, penalty = self.fields, dict[str, Any](), {}
        if fields.get("do_sample") is True:
            options = {"temperature": 1.0, "top_k": 50}
            options |= {n: fields[n] for n in _SAMPLING if fields.get(n) is not None}
        if (rate := fields.get("repetition_penalty")) not in (None, 1):
            penalty = {"repetition_penalty": rate}
        try:
            Sampling(**options)
            Penalties(**penalty)
        except OptionError as error:
            value = (options | penalty)[error.field]
            fact = f"has {error.field} {value!r}, which is out of range"
            raise self._field_error(fact) from error
        options |= penalty
        stops = [text for text in self._list_of("stop_strings", list[str]) if text]
        never = self._list_of("suppress_tokens", list[int])
        words = self._list_of("bad_words_ids", list[list[int]])
        never += [word[0] for word in words if len(word) == 1 and word[0] not in ends]
        if is_speech:
            return cast(Defaults, options)
        if stops:
            options["stop"] = stops
        if never := sorted({id for id in never if 0 <= id < vocab_size}):
            options["logit_bias"] = dict.fromkeys(never, NEVER_BIAS)
        return cast(Defaults, options)

    def passed_over(self, reads_source: bool, is_speech: bool) -> tuple[str, ...]:
        """Return a warning for each field that would change the text, and does not."""
        samples = self.fields.get("do_sample") is True
        tables = SAMPLING_FIELDS * samples, SOURCE_FIELDS * reads_source
        rules = rules_by_name(GENERATION_FIELDS, *tables, SPEECH_FIELDS * is_speech)
        return tuple(passed_over_fields(self.file, self.fields, rules))

    def _list_of(self, name: str, kind: Any) -> Any:
        """Return a list field; a single text becomes a list; `CheckpointError`."""
        value = self.fields.get(name)
        value = [value] if isinstance(value, str) else value
        try:
            return read_record(kind, [] if value is None else value, name)
        except RecordError as error:
            raise self._field_error(f"is malformed ({error})") from error

    def _field_error(self, fact: str) -> CheckpointError:
        file = f"{self.file} of {self.source}"
        return CheckpointError(f"{file} {fact}; correct or remove it")
