"""`raypar prepare` and `TokenFile`: text in, windows of ids out, and what is wrong with a file is said."""

import json
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy
import pytest
import torch
import torch.nn.functional as F

from raypar.cli import main
from raypar.data.token_files import Split, TokenFile, token_loss
from raypar.errors import DataError, UserCodeError
from raypar.job import DataConfig
from raypar.worker.data.sample_reader import SampleReader


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


def read_as(dataset: TokenFile, ids: list[int]) -> dict[str, torch.Tensor]:
    reader = SampleReader.of(dataset, DataConfig(function=TokenFile), seed=3, fields=("x", "y"))
    return reader.read([(0, index) for index in ids])


@pytest.mark.parametrize("split", ["train", "validation", "all"])
def test_the_windows_of_a_microbatch_are_read_at_once_and_are_those_that_are_read_one_by_one(prepared: Path, split: Split):
    data, ids = TokenFile(prepared, 10, split=split), [7, 0, 7, 9]
    found = read_as(data, ids)
    for place, name in enumerate(("x", "y")):
        one_by_one = torch.stack([data[index][place] for index in ids])
        assert torch.equal(found[name], one_by_one) and found[name].stride() == one_by_one.stride() == (10, 1)
    with pytest.raises(UserCodeError, match=r"sample 92 .*no window 92") as raised:
        read_as(TokenFile(prepared, 10), [3, 92])
    assert "its length is 92, so samples 0 to 91 are read" in str(raised.value)


def test_a_token_file_is_asked_once_a_microbatch_and_one_with_samples_of_its_own_for_each(prepared: Path):
    class Counted(TokenFile):
        calls = 0

        def __getitems__(self, ids: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
            self.calls += 1
            return super().__getitems__(ids)

    class Negated(Counted):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            x, y = super().__getitem__(index)
            return x, -y

    counted, negated = Counted(prepared, 10), Negated(prepared, 10)
    plain = read_as(counted, [4, 2, 5])
    assert counted.calls == 1
    assert torch.equal(read_as(negated, [4, 2, 5])["y"], -plain["y"])


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


@pytest.mark.parametrize("tokens", [500, 5_000_000], ids=["whole", "pieces"])
def test_other_tokens_under_the_same_name_have_another_digest(tokens: int, tmp_path: Path):
    def write(values: numpy.ndarray, name: str = "t.bin") -> TokenFile:
        values.astype("<u2").tofile(tmp_path / name)
        return TokenFile(tmp_path / name, 8)

    values = numpy.random.RandomState(0).randint(0, 999, tokens)
    first = write(values).raypar_content_digest
    assert write(values, "copy.bin").raypar_content_digest == first
    for other in (values[::-1], numpy.concatenate([values[: -tokens // 2], values[: tokens // 2] + 1]), values[:-100]):
        assert write(other).raypar_content_digest != first
    held_out = TokenFile(tmp_path / "copy.bin", 8, split="validation").raypar_content_digest
    values[0] += 1
    write(values, "copy.bin")
    assert TokenFile(tmp_path / "copy.bin", 8, split="validation").raypar_content_digest == held_out
