"""`raypar prepare` and `TokenFile`: text in, windows of ids out, and what is wrong with a file is said."""

import json
import pickle
import sys
from pathlib import Path

import numpy
import pytest
import torch
import torch.nn.functional as F

from raypar.cli import main
from raypar.data.token_files import TokenFile, token_loss
from raypar.errors import DataError


def by_letter(text: str) -> list[int]:
    return [ord(letter) + 70_000 for letter in text]


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(256)) * 4 + b"\xff\xfe")
    assert main(["prepare", str(text), "--out", str(tmp_path / "text.bin")]) == 0
    return tmp_path / "text.bin"


def test_bytes_become_ids_and_windows_are_shifted_by_one(prepared: Path):
    tokens = bytes(range(256)) * 4 + b"\xff\xfe"
    data = TokenFile(prepared, 100, split="all")
    assert len(data) == (len(tokens) - 1) // 100
    for index in range(len(data)):
        x, y = data[index]
        assert x.dtype == torch.int64
        assert x.tolist() == list(tokens[index * 100 : index * 100 + 100])
        assert y.tolist() == list(tokens[index * 100 + 1 : index * 100 + 101])


def test_training_and_validation_share_no_token(prepared: Path):
    train, validation = TokenFile(prepared, 10), TokenFile(prepared, 10, split="validation", held_out=0.1)
    assert (train.first, train.last, validation.last) == (0, validation.first, 1026)
    assert validation.last - validation.first == 102


def test_a_token_file_travels_without_its_tokens(prepared: Path):
    data = TokenFile(prepared, 100)
    before = data[3]
    again = pickle.loads(pickle.dumps(data))
    assert len(pickle.dumps(data)) < 1000
    assert all(torch.equal(a, b) for a, b in zip(before, again[3], strict=True))


def test_a_nanogpt_file_without_notes_is_uint16(tmp_path: Path):
    numpy.arange(1000, 1050, dtype=numpy.uint16).tofile(tmp_path / "train.bin")
    assert TokenFile(tmp_path / "train.bin", 5, split="all")[1][0].tolist() == [1005, 1006, 1007, 1008, 1009]


def test_a_tokenizer_of_ones_own_and_uint32(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    text = tmp_path / "text.txt"
    text.write_text("über\nalles")
    arguments = ["prepare", str(text), "--out", str(tmp_path / "t.bin"), "--tokenizer", f"{__name__}:by_letter"]
    assert main(arguments) == 2
    assert "use --dtype uint32" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.bin*")) and not list(tmp_path.glob(".*"))
    assert main([*arguments, "--dtype", "uint32"]) == 0
    assert json.loads((tmp_path / "t.bin.json").read_text())["dtype"] == "uint32"
    assert TokenFile(tmp_path / "t.bin", 9, split="all")[0][0].tolist() == by_letter("über\nalles")[:9]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-2]), "not 1026 tokens"),
        (lambda path: path.unlink(), "cannot read token file"),
        (lambda path: path.with_name("text.bin.json").write_text("{"), "is not JSON"),
    ],
)
def test_a_spoilt_token_file_is_refused(prepared: Path, spoil, said: str):
    spoil(prepared)
    with pytest.raises(DataError, match=said):
        TokenFile(prepared, 10)


@pytest.mark.parametrize("index", [-1, 92])
def test_a_window_that_is_not_there_is_refused_with_those_there_are(prepared: Path, index: int):
    file = TokenFile(prepared, 10)
    assert len(file) == 92
    with pytest.raises(IndexError, match=rf"no window {index}: .*text\.bin has windows 0 to 91 \(92 in all\)"):
        file[index]


def test_a_context_longer_than_the_text_is_refused(prepared: Path):
    with pytest.raises(DataError, match=r"validation part of token file .* has 102 tokens"):
        TokenFile(prepared, 102, split="validation")


def test_a_tokenizer_in_the_current_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "own_tokenizer.py").write_text("def words(text):\n    return [len(word) for word in text.split()]\n")
    (tmp_path / "text.txt").write_text("three words here")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [place for place in sys.path if place not in ("", str(tmp_path))])
    assert main(["prepare", "text.txt", "--out", "t.bin", "--tokenizer", "own_tokenizer:words"]) == 0
    assert numpy.fromfile(tmp_path / "t.bin", dtype="<u2").tolist() == [5, 5, 4]


@pytest.mark.parametrize("arguments", [["absent.txt", "--out", "a.bin"], ["--out", "a.bin"], ["text.txt", "--out", "a.txt"]])
def test_prepare_with_bad_arguments_exits_with_2(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("text")
    assert main(["prepare", *arguments]) == 2


def test_padding_counts_for_nothing_in_the_token_loss():
    logits, targets = torch.randn(2, 3, 7), torch.tensor([[1, 2, -100], [6, -100, 0]])
    total, count = token_loss(logits, targets)
    kept = targets != -100
    assert count == 4.0
    torch.testing.assert_close(total, F.cross_entropy(logits[kept], targets[kept], reduction="sum"))
