import json
import shutil

import pytest

from jetdraft.bench import tuning
from tests.cli.running import assert_refused, jetdraft


@pytest.fixture
def quick(monkeypatch):
    """One turn: the times do not matter."""
    monkeypatch.setattr(tuning, "TURNS", 1)


def test_the_table_and_the_profile(copied_bundle, quick):
    done = jetdraft("tune", copied_bundle, "--threads", "1")
    assert done.exit_code == 0
    widths = [line.split()[0] for line in done.stdout.splitlines()[1:33]]
    assert widths == [str(width) for width in range(1, 33)]
    assert "lookup" in done.stdout
    assert (copied_bundle / "profiles" / "cpu-1-tuning.json").is_file()


def test_json_is_one_object(copied_bundle, quick):
    done = jetdraft("tune", copied_bundle, "--threads", "1", "--json")
    found = json.loads(done.stdout)
    assert set(found["curve"]) >= {"passes", "trees", "drafts", "compaction"}
    assert found["machine"]["threads"] == 1


def test_where_the_times_cannot_be_kept_none_are_measured(copied_bundle):
    shutil.rmtree(copied_bundle / "profiles")
    (copied_bundle / "profiles").write_text("a file in the place of the folder")
    assert_refused(
        jetdraft("tune", copied_bundle, "-t", "1"), "cannot write", "cpu-1-tuning"
    )
