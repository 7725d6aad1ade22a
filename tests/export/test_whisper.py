"""Whisper's logits and transcripts are transformers', whatever the method."""

import shutil

import numpy as np
import pytest
import torch
from transformers import WhisperForConditionalGeneration

import jetdraft
from jetdraft import BundleError, CheckpointError, OptionError, errors
from jetdraft.runtime.speech.sound import log_mel
from tests import cases, edit_manifest, read_manifest, whispers
from tests.export.conftest import check_logits
from tests.tiny import exported, refused

FRAMES = 2 * whispers.SLOTS


@pytest.fixture(scope="module")
def model(whisper):
    return jetdraft.load(whisper / "bundle", threads=1)


@pytest.fixture(scope="module")
def own(whisper):
    folder = whisper / "checkpoint"
    return WhisperForConditionalGeneration.from_pretrained(folder).eval()


def features(samples):
    return log_mel(samples, 80, FRAMES)


def test_logits_are_those_of_transformers(model, own):
    target = model.parts.target
    ids = np.random.default_rng(0).integers(0, whispers.TOKENS, 20).tolist()
    for hertz in (440.0, 200.0):
        heard = features(whispers.sound(1.0, hertz=hertz))
        target.source.encode(heard)
        given = {"decoder_input_ids": torch.tensor([ids])}
        with torch.no_grad():
            wanted = own(torch.tensor(heard)[None], **given).logits[0]
        check_logits(target, ids, wanted)
    model.forget()


def test_the_bundle_has_the_rows_of_the_checkpoint(model):
    contract = model.bundle.target.contract
    assert (contract.capacity, contract.source_slots) == (64, whispers.SLOTS)
    assert model.bundle.speech.languages == {"en": 290, "de": 291}
    assert jetdraft.Bundle.open(model.bundle.path) == model.bundle


@pytest.mark.parametrize("timestamps", [True, False], ids=["timed", "untimed"])
@pytest.mark.parametrize("language", ["de", None])
def test_a_window_is_that_of_transformers(model, own, timestamps, language):
    samples = whispers.sound(1.0)
    how = {"language": language, "max_new_tokens": 24}
    found = model.transcribe(samples, timestamps=timestamps, method="none", **how)
    how |= {"task": "transcribe", "do_sample": False, "num_beams": 1}
    wanted = own.generate(
        torch.tensor(features(samples))[None],
        return_timestamps=timestamps,
        **how,
        # transformers lets a model write timestamps that nobody asked for.
        suppress_tokens=whispers.SETTINGS["suppress_tokens"]
        + ([] if timestamps else whispers.TIMESTAMPS),
        # The end of the text, timestamps too, as the model wrote it.
        return_dict_in_generate=True,
        return_segments=False,
        force_unique_generate_call=True,
    )
    ids = (wanted if torch.is_tensor(wanted) else wanted.sequences)[0].tolist()
    spoken = whispers.LANGUAGES[f"<|{found.language}|>"]
    prompt = [whispers.START, spoken, whispers.TASKS["transcribe"]]
    prompt += [] if timestamps else [whispers.NO_TIMESTAMPS]
    assert ids[: len(prompt)] == prompt
    written = ids[len(prompt) :]
    assert len(written) >= 20
    # The next window, where the first one was cut off, is not transformers'.
    assert found.token_ids[: len(written)] == written
    assert found.language in ("en", "de")
    assert language in (None, found.language)


def test_scores_of_a_window_are_those_of_transformers(model, own):
    samples, asked = whispers.sound(1.0), {"language": "en", "timestamps": False}
    found = model.transcribe(samples, logprobs=0, max_new_tokens=20, **asked)
    prompt = [whispers.START, *whispers.LANGUAGES.values()][:2]
    prompt += [whispers.TASKS["transcribe"], whispers.NO_TIMESTAMPS]
    ids = torch.tensor([[*prompt, *found.token_ids]])
    heard = torch.tensor(features(samples))[None]
    with torch.no_grad():
        logprobs = own(heard, decoder_input_ids=ids).logits[0].log_softmax(-1)
    written = [
        float(logprobs[place, token])
        for place, token in enumerate(found.token_ids, len(prompt) - 1)
    ]
    (segment,) = found.segments
    assert len(written) == len(found.logprobs) == 20
    assert segment.avg_logprob == pytest.approx(np.mean(written), abs=1e-3)
    # As in transformers, the token before "no timestamps" stands for silence.
    silence = float(logprobs[0, whispers.NO_TIMESTAMPS - 1].exp())
    assert segment.no_speech_prob == pytest.approx(silence, rel=1e-3)
    plain = model.transcribe(samples, max_new_tokens=20, **asked)
    assert (plain.token_ids, plain.logprobs) == (found.token_ids, None)
    assert plain.segments[0].no_speech_prob is None


def test_a_later_window_knows_its_beginning(model):
    found = model.transcribe(whispers.sound(2.0), language="en", timestamps=False)
    assert [segment.window for segment in found.segments] == [0.0, 1.0]


@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "seed": 3}], ids=str)
@pytest.mark.parametrize("timestamps", [True, False], ids=["timed", "untimed"])
def test_each_method_gives_the_transcript_of_plain_decoding(model, options, timestamps):
    samples = whispers.sound(2.2)
    options = {**options, "timestamps": timestamps, "language": "en"}
    plain = model.transcribe(samples, method="none", **options)
    assert len(plain.token_ids) > 20
    assert timestamps == any(t in whispers.TIMESTAMPS for t in plain.token_ids)
    assert "draft" in model.methods
    assert "lookup" in model.methods
    for method in (*model.methods[1:], "auto"):
        for length in (1, 3, None) if method != "auto" else (None,):
            found = model.transcribe(
                samples, method=method, num_draft_tokens=length, **options
            )
            assert found.token_ids == plain.token_ids, (method, length)
            assert found.segments == plain.segments


def test_the_drafters_encoder_runs_only_for_methods_that_may_ask_it(model):
    drafter = model.parts.drafter.source
    asked = {"language": "en", "max_new_tokens": 12}
    plain = model.transcribe(whispers.sound(0.8), method="none", **asked)
    before = drafter.seconds
    for hertz, method in ((300.0, "none"), (310.0, "lookup")):
        model.transcribe(whispers.sound(0.8, hertz=hertz), method=method, **asked)
    assert drafter.seconds == before
    drafted = model.transcribe(whispers.sound(0.8), method="draft", **asked)
    assert drafter.seconds > before
    assert drafted.token_ids == plain.token_ids


def test_a_drafter_that_is_the_target_is_right_where_no_rule_decides(model):
    """Timestamps follow rules that a drafter does not know; without them it is."""
    how = {"method": "draft", "num_draft_tokens": 3, "language": "en"}
    stats = model.transcribe(whispers.sound(1.0), timestamps=False, **how).stats
    assert min(stats.accepted_by_position) > 0.8


def test_checkpoints_that_lack_something_are_refused(tmp_path):
    bare = whispers.save(tmp_path / "bare", {})
    refused(CheckpointError, "lacks tokens of speech", bare)
    (bare / "preprocessor_config.json").write_text('{"n_fft": 512}')
    refused(errors.UnsupportedModelError, "has n_fft 512", bare)


@cases("change", {"tasks": {}}, {"languages": {}}, {"no_timestamps": 10**6}, ids=str)
def test_manifests_with_wrong_tokens_of_speech_are_refused(whisper, tmp_path, change):
    folder = tmp_path / "bundle"
    shutil.copytree(whisper / "bundle", folder)
    edit_manifest(folder, speech={**read_manifest(folder)["speech"], **change})
    with pytest.raises(BundleError, match="a model that hears has tokens of speech"):
        jetdraft.Bundle.open(folder)


def test_quantized_transcripts_are_the_same_with_every_method(whisper, tmp_path):
    bundle = exported(whisper / "checkpoint", tmp_path / "bundle", "int8")
    # Two layers of matrices of a byte a weight, and scales: four of attention, two of
    # the MLP, two for the cross attention's rows. Convolutions, positions are floats.
    weights = 2 * ((4 + 2) * 64 * 64 + 2 * 64 * 96)
    floats = 3 * 64 * (80 + 64) + 64 * whispers.SLOTS
    encoder = bundle.files["target-encoder.onnx.data"]["bytes"]
    assert encoder < 1.5 * weights + 4.2 * floats
    with jetdraft.load(tmp_path / "bundle", threads=1) as model:
        found = [
            model.transcribe(whispers.sound(1.0), language="en", method=method)
            for method in model.methods
        ]
    assert all(one.token_ids == found[0].token_ids for one in found)


def test_wrong_wishes_are_refused(model, bundle, tmp_path):
    samples = whispers.sound(0.5)
    for wish, said in (
        ({"language": "xx"}, "no language 'xx'; choose de, en"),
        ({"task": "sing"}, "no task 'sing'; choose transcribe, translate"),
        ({"stop": ["a"]}, "a transcript has no stop"),
        ({"regex": "a+"}, "a transcript has no constraint"),
        ({"images": [np.zeros((2, 2), np.uint8)]}, "a transcript has no images"),
    ):
        with pytest.raises(OptionError, match=said):
            model.transcribe(samples, **wish)
    with pytest.raises(OptionError, match="hears, and reads no text"):
        model.generate("hello")
    with (
        jetdraft.load(bundle, threads=1) as reader,
        pytest.raises(OptionError, match="reads text and hears nothing"),
    ):
        reader.transcribe(samples)


def test_a_transcription_can_be_cancelled_and_has_a_deadline(model):
    long = whispers.sound(20.0)
    transcription = model.transcription(long, jetdraft.TranscribeOptions("en"))
    next(transcription)
    transcription.cancel()
    ended = transcription.result()
    assert ended.finish_reason == ended.stats.finish_reason == "cancelled"
    assert len(ended.segments) < 20
    for language in ("en", None):
        late = model.transcribe(long, language=language, max_seconds=1e-6)
        assert (late.finish_reason, late.text) == ("deadline", "")


def test_a_cancel_before_the_language_is_known_ends_it(model):
    transcription = model.transcription(whispers.sound(1.0))
    detect = transcription._detect_language

    def cancelled(features):
        transcription.cancel()
        return detect(features)

    transcription._detect_language = cancelled
    ended = transcription.result()
    assert (ended.finish_reason, ended.language) == ("cancelled", "")


@pytest.mark.parametrize("reason", ["interrupted", "cancelled", "deadline"])
def test_a_later_window_says_why_the_text_ended(model, reason):
    transcription = model.transcription(
        whispers.sound(3.0),
        jetdraft.TranscribeOptions("en"),
        max_new_tokens=4,
        max_seconds=60.0,
    )
    write, windows = transcription._write_window, []

    def second(features):
        windows.append(features)
        if len(windows) == 2 and reason == "interrupted":
            raise KeyboardInterrupt
        if len(windows) == 2 and reason == "cancelled":
            transcription.cancel()
        if len(windows) == 2 and reason == "deadline":
            transcription._started -= 60.0
        return write(features)

    transcription._write_window = second
    try:
        list(transcription)
    except KeyboardInterrupt:
        transcription.close("interrupted")
    ended = transcription.result()
    assert len(windows) == 2
    assert ended.finish_reason == ended.stats.finish_reason == reason


def test_the_reason_of_a_whole_text_counts_all_windows(model):
    samples, asked = whispers.sound(2.0), {"language": "en", "timestamps": False}
    cut = model.transcribe(samples, max_new_tokens=4, **asked)
    assert cut.finish_reason == cut.stats.finish_reason == "length"
    transcription = model.transcription(
        samples, exact=False, drafting={"verifier": "typical"}
    )
    assert transcription.stats.lossy == "verifier typical"
