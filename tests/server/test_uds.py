"""The server's socket in the file system."""

import os
import socket
import stat

import httpx
import pytest

from jetdraft.errors import OptionError
from jetdraft.server.http_server import open_unix_listener
from tests.server.serving import started

GOOD = {"model": "toy", "prompt": "The robot", "max_tokens": 9, "seed": 1}


def test_a_server_answers_at_both_doors(toy, tmp_path, model):
    path = tmp_path / "s"
    with started(toy, "--uds", path) as (process, address):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as client:
            # No page of a browser comes this way, so any name will do.
            answer = client.post("http://robot/v1/completions", json=GOOD, timeout=60)
        other = httpx.post(f"{address}/v1/completions", json=GOOD, timeout=60)
        texts = {a.json()["choices"][0]["text"] for a in (answer, other)}
        assert len(texts) == 1
        process.terminate()
        assert process.wait(60) == 0
    assert not path.exists()


def test_the_socket_of_a_dead_server_is_replaced(toy, tmp_path):
    path = tmp_path / "s"
    with started(toy, "--uds", path) as (process, _):
        process.kill()
        process.wait()
    assert stat.S_ISSOCK(path.lstat().st_mode)
    with open_unix_listener(path), socket.socket(socket.AF_UNIX) as line:
        line.connect(str(path))


def test_the_socket_of_a_server_that_lives_is_left(tmp_path):
    path = tmp_path / "s"
    with open_unix_listener(path):
        with pytest.raises(OptionError, match="another server listens"):
            open_unix_listener(path).__enter__()
        assert path.exists()


def test_nothing_but_a_socket_is_removed(tmp_path):
    file, link, folder = (tmp_path / name for name in ("file", "link", "folder"))
    file.write_text("kept")
    link.symlink_to(tmp_path / "nowhere")
    folder.mkdir()
    os.mkfifo(tmp_path / "fifo")
    for path in (file, link, folder, tmp_path / "fifo"):
        with pytest.raises(OptionError, match="no socket"):
            open_unix_listener(path).__enter__()
    assert file.read_text() == "kept"
    assert link.is_symlink()
    assert folder.is_dir()


def test_what_replaced_the_socket_stays(tmp_path):
    path = tmp_path / "s"
    with open_unix_listener(path):
        path.unlink()
        path.write_text("kept")
    assert path.read_text() == "kept"


@pytest.mark.parametrize("name", ["x" * 200, "none/s", "a\0b"])
def test_impossible_paths(tmp_path, name):
    with pytest.raises(OptionError, match="choose another --uds"):
        open_unix_listener(tmp_path / name).__enter__()


def test_the_mask_of_the_process_is_as_before(tmp_path):
    before = os.umask(0o022)
    try:
        with open_unix_listener(tmp_path / "s"):
            assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)
