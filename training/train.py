"""Train the bundled model on the books; resumes from the run's last checkpoint.

The learning rate and the context follow the share of --hours that is spent, so the rate is at
zero when the time is over, however fast the machine is.

Example:
    python -m training.train --text ../shared/data/text --tokenizer run/tokenizer \
        --run run/books --hours 1.6
"""

from __future__ import annotations

import argparse
import csv
import math
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from transformers import AutoTokenizer

from training import checkpoint, model, schedule
from training.data import Corpus, TrainingWindows, Window, held_out_windows
from training.optimizer import KINDS, Optimizers

COLUMNS = (
    "step", "tokens", "seconds", "context", "rate_share", "train_loss", "held_out_loss", "recall",
)  # fmt: skip
LOG_FILE = "train_log.csv"


@dataclass(frozen=True)
class Settings:
    """What a run is asked to do."""

    text: Path
    tokenizer: Path
    run: Path
    hours: float
    layers: int
    optimizer: str
    rate: float
    embedding_rate: float
    batch_tokens: int
    fact_share: float
    eval_every: int
    save_minutes: float
    threads: int
    seed: int
    compile: bool


class HeldOut:
    """Quick checks between steps: loss on a held-out book, recall of held-out facts."""

    def __init__(self, corpus: Corpus, tokens: int) -> None:
        self.corpus = corpus
        self.tokens = tokens
        self.windows: dict[int, tuple[list[Window], list[Window]]] = {}

    def measure(self, net: torch.nn.Module, context: int) -> tuple[float, float]:
        """Measure at one context.

        Args:
            net: The model.
            context: Window length.

        Returns:
            Mean loss of plain windows, and share of the answers recalled in windows with facts.
        """
        if context not in self.windows:
            count = max(2, self.tokens // context)
            self.windows[context] = (
                held_out_windows(self.corpus, count, context),
                held_out_windows(self.corpus, count, context, facts=True),
            )
        plain, facts = self.windows[context]
        loss, _ = model.loss_and_hits(net, torch.from_numpy(np.stack([w.tokens for w in plain])))
        _, hits = model.loss_and_hits(net, torch.from_numpy(np.stack([w.tokens for w in facts])))
        recalled = [
            bool(hits[row, answer.start - 1 : answer.stop - 1].all())
            for row, window in enumerate(facts)
            for answer in window.answers
            if answer.occurrence > 0
        ]
        return loss.mean().item(), float(np.mean(recalled))


class Trainer:
    """One run: model, optimizers, data and how far they are."""

    def __init__(self, settings: Settings, console: Console) -> None:
        self.settings = settings
        self.console = console
        settings.run.mkdir(parents=True, exist_ok=True)
        tokenizer = AutoTokenizer.from_pretrained(settings.tokenizer)
        corpus = Corpus.training(settings.text, tokenizer, settings.run / "tokens.npy")
        self.windows = TrainingWindows(corpus, settings.seed, settings.fact_share)
        self.held_out = HeldOut(
            Corpus.held_out(settings.text, ("frankenstein.txt",), tokenizer), 16_384
        )
        self.net = model.build_model(model.build_config(tokenizer, settings.layers), settings.seed)
        self.optimizers = Optimizers(
            self.net, settings.optimizer, settings.rate, settings.embedding_rate
        )
        self.progress = checkpoint.Progress()
        if checkpoint.exists(settings.run):
            self.progress, states = checkpoint.load(settings.run)
            self.net.load_state_dict(states["model"])
            self.optimizers.load_state_dict(states["optimizers"])
            torch.set_rng_state(states["rng"])
            console.print(f"resumed at step {self.progress.step}")
        self.loss = model.NextTokenLoss(self.net, settings.compile)
        self._cut_log()

    @property
    def share(self) -> float:
        """Share of the training time that is spent."""
        return self.progress.seconds / (self.settings.hours * 3600)

    def save(self) -> None:
        """Write a checkpoint."""
        checkpoint.save(
            self.settings.run,
            self.progress,
            model=self.net.state_dict(),
            optimizers=self.optimizers.state_dict(),
            rng=torch.get_rng_state(),
        )

    def run(self) -> None:
        """Train until the time is over; Ctrl-C writes a checkpoint and leaves."""
        saved = time.monotonic()
        recent: list[float] = []
        columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=self.console) as bar:
            task = bar.add_task("starting", total=1.0)
            try:
                while self.share < 1.0:
                    began = time.monotonic()
                    recent.append(self._step())
                    last = recent[-1]
                    if not math.isfinite(last):
                        raise FloatingPointError(
                            f"train loss is {last} at step {self.progress.step}; lower --rate"
                        )
                    if self.progress.step % self.settings.eval_every == 0:
                        self._log(float(np.mean(recent)))
                        recent.clear()
                    self.progress.seconds += time.monotonic() - began
                    text = f"step {self.progress.step} loss {last:.3f}"
                    bar.update(task, completed=min(1.0, self.share), description=text)
                    if time.monotonic() - saved > self.settings.save_minutes * 60:
                        self.save()
                        saved = time.monotonic()
            except KeyboardInterrupt:
                self.console.print("interrupted: writing a checkpoint")
            else:
                self._log(float(np.mean(recent)) if recent else math.nan)
        self.save()

    def _step(self) -> float:
        context = schedule.context(self.share)
        count = max(1, self.settings.batch_tokens // context)
        tokens = torch.from_numpy(self.windows.batch(self.progress.window, count, context + 1))
        loss = self.loss(tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.optimizers.step(schedule.learning_rate_share(self.share))
        self.progress.step += 1
        self.progress.window += count
        self.progress.tokens += count * context
        return loss.item()

    def _log(self, train_loss: float) -> None:
        context = schedule.context(self.share)
        held_out_loss, recall = self.held_out.measure(self.net, context)
        values = (
            self.progress.step, self.progress.tokens, round(self.progress.seconds), context,
            round(schedule.learning_rate_share(self.share), 4),
            round(train_loss, 4), round(held_out_loss, 4), round(recall, 4),
        )  # fmt: skip
        with self.log_path.open("a", newline="") as file:
            csv.writer(file).writerow(values)
        if not self.console.is_terminal:
            self.console.print(dict(zip(COLUMNS, values, strict=True)))

    @property
    def log_path(self) -> Path:
        """The CSV log of the run."""
        return self.settings.run / LOG_FILE

    def _cut_log(self) -> None:
        """Drop the rows after the checkpoint, which are trained again."""
        rows: list[list[str]] = []
        if self.log_path.exists():
            with self.log_path.open(newline="") as file:
                rows = [row for row in csv.reader(file) if row and row[0].isdigit()]
        with self.log_path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(COLUMNS)
            writer.writerows(row for row in rows if int(row[0]) <= self.progress.step)


def parse_arguments() -> Settings:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--text", type=Path, required=True, help="folder with the training and held-out books")
    add("--tokenizer", type=Path, required=True, help="folder that training.tokenizer wrote")
    add("--run", type=Path, required=True, help="folder for checkpoint, log and cached tokens")
    add("--hours", type=float, default=1.6, help="training time (default 1.6)")
    add("--layers", type=int, default=6, help="decoder layers (default 6)")
    add("--optimizer", choices=KINDS, default="muon", help="for hidden matrices (default muon)")
    add("--rate", type=float, default=4e-3, help="peak learning rate of hidden matrices")
    add("--embedding-rate", type=float, default=4e-3, help="peak rate of embedding and norms")
    add("--batch-tokens", type=int, default=8192, help="tokens in one step (default 8192)")
    add("--fact-share", type=float, default=0.45, help="share of windows with facts")
    add("--eval-every", type=int, default=100, help="steps between two log rows (default 100)")
    add("--save-minutes", type=float, default=4.0, help="time between checkpoints (default 4)")
    add("--threads", type=int, default=2, help="CPU threads (default 2)")
    add("--seed", type=int, default=0, help="seed of weights and data (default 0)")
    add("--no-compile", dest="compile", action="store_false", help="do not use torch.compile")
    return Settings(**vars(parser.parse_args()))


def main() -> None:
    """Run the command line."""
    settings = parse_arguments()
    torch.set_num_threads(settings.threads)
    for number in (signal.SIGINT, signal.SIGTERM):  # a background process ignores Ctrl-C
        signal.signal(number, signal.default_int_handler)
    Trainer(settings, Console()).run()


if __name__ == "__main__":
    main()
