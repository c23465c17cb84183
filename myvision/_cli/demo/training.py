"""Trains the network: batches from worker processes, a learning-rate schedule, averaged weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.data import DataLoader
from tqdm import tqdm

from .data import Digits
from .model import DigitNet

BATCH_SIZE = 64
PEAK_LEARNING_RATE = 5e-3
AVERAGED_SHARE = 0.3  # of the epochs, at the end


@dataclass
class History:
    """Loss and test accuracy, epoch by epoch, and the accuracy of the averaged weights."""

    loss: list[float] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)
    final_accuracy: float = 0.0


def train(model: DigitNet, digits: Digits, epochs: int, workers: int) -> tuple[DigitNet, History]:
    """Returns the model with the weights averaged over the last epochs, and how training went."""
    loader: DataLoader[Any] = DataLoader(
        digits.train,
        BATCH_SIZE,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        persistent_workers=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    scheduler = OneCycleLR(optimizer, PEAK_LEARNING_RATE, total_steps=epochs * len(loader))
    averaged = AveragedModel(model)
    history = History()
    progress = tqdm(range(epochs), desc="training", unit="epoch")
    for epoch in progress:
        history.loss.append(_train_epoch(model, loader, optimizer, scheduler))
        history.accuracy.append(accuracy(model, digits.test_moved, digits.test_labels))
        progress.set_postfix(loss=f"{history.loss[-1]:.3f}", accuracy=f"{history.accuracy[-1]:.1%}")
        if epoch >= epochs * (1 - AVERAGED_SHARE) - 1:
            averaged.update_parameters(model)
    update_bn(loader, averaged)
    history.final_accuracy = accuracy(averaged, digits.test_moved, digits.test_labels)
    assert isinstance(averaged.module, DigitNet)
    return averaged.module, history


def _train_epoch(
    model: nn.Module,
    loader: DataLoader[Any],
    optimizer: torch.optim.Optimizer,
    scheduler: LRScheduler,
) -> float:
    model.train()
    total = 0.0
    for images, labels in loader:
        loss = F.cross_entropy(model(images), labels, label_smoothing=0.05)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        total += loss.item()
    return total / len(loader)


@torch.no_grad()
def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """The share of images whose highest score is that of their label."""
    model.eval()
    return (model(images).argmax(1) == labels).float().mean().item()
