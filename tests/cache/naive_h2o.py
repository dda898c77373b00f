"""H2O from docs/algorithm.md and policies.md, in loops, float64 and NumPy alone.

Nothing of h2okv or transformers is imported: the model is a Llama written down once more, a
sequence is a list of entries for each layer and KV head, and the matrix of probabilities is made.
"""

import copy
import itertools
import math

import numpy as np

# How far behind a block's end `expected` asks its queries again.
AHEAD = 16
# Relative differences of scores, and differences of codes, that fp32 may decide either way.
CLOSE_SCORES, CLOSE_CODES = 5e-5, 5e-5


class NearTieError(Exception):
    """Two orders, or codes, are right within what fp32 can tell."""


class Entry:
    """A token in the cache of one KV head."""

    def __init__(self, position, key, value):
        self.position, self.key, self.value = position, key, value
        self.received = self.observed = 0.0
        self.is_pinned = False


class Sequence:
    """What one text has left in the cache: entries by layer and head, oldest first."""

    def __init__(self, layers, heads):
        self.entries = [[[] for _ in range(heads)] for _ in range(layers)]
        self.num_seen = 0
        self.prompt_length = None
        self.queries = {}  # of a span that has not ended, by layer and head
        self.span_starts = {}  # tokens before the first span, likewise
        self.num_cut = {}  # tokens read at the last eviction, likewise

    def fork(self):
        return copy.deepcopy(self)


class NaiveH2O:
    """A Llama whose attention keeps what the contract says."""

    def __init__(self, weights, sizes, options, transforms=None):
        self.weights, self.sizes, self.options = weights, sizes, options
        self.transforms = transforms  # centers and scales of 4-bit keys, each ``[layers, H, D]``
        size = sizes["head_dim"]
        self.frequencies = sizes["theta"] ** (-np.arange(0, size, 2) / size)

    def begin(self):
        return Sequence(self.sizes["layers"], self.sizes["kv_heads"])

    def read(self, sequence, tokens):
        """Logits ``[T, V]`` of a block of tokens; mutates the sequence."""
        weights, sizes = self.weights, self.sizes
        if not tokens:
            return np.zeros((0, sizes["vocabulary"]))
        if sequence.prompt_length is None:
            sequence.prompt_length = len(tokens)
        hidden = weights["model.embed_tokens.weight"][tokens]
        for layer in range(sizes["layers"]):
            name = f"model.layers.{layer}."

            def linear(states, letter, name=name):
                return states @ weights[f"{name}{letter}.weight"].T

            normed = self._norm(hidden, f"{name}input_layernorm.weight")
            query, key, value = (
                linear(normed, f"self_attn.{letter}_proj").reshape(
                    len(tokens), -1, sizes["head_dim"]
                )
                for letter in "qkv"
            )
            hidden = hidden + linear(
                self._attend(sequence, layer, query, key, value), "self_attn.o_proj"
            )
            normed = self._norm(hidden, f"{name}post_attention_layernorm.weight")
            gate = linear(normed, "mlp.gate_proj")
            gate = gate / (1 + np.exp(-gate))
            hidden = hidden + linear(gate * linear(normed, "mlp.up_proj"), "mlp.down_proj")
        sequence.num_seen += len(tokens)
        return self._norm(hidden, "model.norm.weight") @ weights["lm_head.weight"].T

    def forget(self, sequence, start, stop):
        """Take the entries of a span out; scores and queries stay."""
        for heads in sequence.entries:
            for head, entries in enumerate(heads):
                heads[head] = [e for e in entries if not start <= e.position < stop]

    def _norm(self, hidden, name):
        scale = np.sqrt((hidden**2).mean(axis=-1, keepdims=True) + self.sizes["eps"])
        return hidden / scale * self.weights[name]

    def _rotated(self, vector, position):
        angles = position * self.frequencies
        first, second = np.split(vector, 2)
        return np.concatenate([
            first * np.cos(angles) - second * np.sin(angles),
            second * np.cos(angles) + first * np.sin(angles),
        ])  # fmt: skip

    def _attend(self, sequence, layer, query, key, value):
        """Return ``[T, HQ * D]`` of un-rotated queries, keys and values ``[T, heads, D]``."""
        length, heads = len(query), key.shape[1]
        groups = query.shape[1] // heads
        output = np.zeros_like(query)
        blocks = self._blocks(sequence.num_seen, length)
        for head in range(heads):
            for start, stop in blocks:
                tokens, heads_of_group = (
                    slice(start, stop),
                    slice(head * groups, (head + 1) * groups),
                )
                output[tokens, heads_of_group] = self._block(
                    sequence, layer, head, sequence.num_seen + start,
                    query[tokens, heads_of_group], key[tokens, head], value[tokens, head],
                )  # fmt: skip
        return output.reshape(length, -1)

    def _blocks(self, seen, length):
        """Return the pairs of numbers of tokens into which a block is cut."""
        every = self.options["evict_every"]
        cuts = ()
        if every and not self.options["whole_prompts"]:
            cuts = range(every - seen % every, length, every)
        edges = [0, *cuts, length]
        return list(itertools.pairwise(edges))

    def _block(self, sequence, layer, head, start, query, key, value):
        """Read one block of one KV head: attend, score, evict; ``[T, G, D]``."""
        options = self.options
        rolls, bits = options["positions"] == "rolling", options["kv_bits"]
        cached, length = sequence.entries[layer][head], len(key)
        added = []
        for token in range(length):
            position = start + token
            stored_key = key[token] if rolls else self._rotated(key[token], position)
            entry = Entry(position, stored_key, value[token])
            entry.is_pinned = position < sequence.prompt_length and any(
                first <= position < stop for first, stop in options["pins"]
            )
            added.append(entry)
        # A text's first token comes as a block; a single one behind it is an entry at once.
        is_step = length == 1 and start > 0
        every = self.options["evict_every"] or 1
        is_whole = self.options["whole_prompts"] and not is_step
        rounds_first = is_step or (every > 1 and not is_whole)
        if bits and rounds_first:
            for entry in added:
                self._round(entry, layer, head)
        entries = cached + added
        output = np.zeros((length, query.shape[1], value.shape[-1]))
        probabilities = np.zeros((query.shape[1], length, len(entries)))
        again = np.zeros_like(probabilities)
        keys = np.array(
            [self._rotated(e.key, rank) if rolls else e.key for rank, e in enumerate(entries)]
        )
        values = np.array([e.value for e in entries])
        sinks = self._sinks(layer, head, query.shape[1])
        for group in range(query.shape[1]):
            for token in range(length):
                rank_of_query = len(cached) + token if rolls else start + token
                visible = len(cached) + token + 1
                rotated_query = self._rotated(query[token, group], rank_of_query)
                weights = _softmax(keys[:visible], rotated_query, sinks[group])
                probabilities[group, token, :visible] = weights
                output[token, group] = weights @ values[:visible]
        for token, group in np.ndindex(query.shape[:2]):
            last = len(entries) - 1 if rolls else start + length - 1
            rotated_query = self._rotated(query[token, group], last + AHEAD)
            again[group, token] = _softmax(keys, rotated_query, sinks[group])
        first = sequence.span_starts.get((layer, head), 0)
        waits = not is_whole and every > 1 and (start + length - first) % every != 0
        if is_whole:
            sequence.span_starts[layer, head] = start + length
            if span := sequence.queries.pop((layer, head), None):
                before = keys[: len(cached)]
                last = len(cached) - 1 if rolls else start - 1
                self._score_span(cached, before, span, last, _means(sinks))
        if options["scoring"] == "expected" and every > 1 and not is_whole:
            sequence.queries.setdefault((layer, head), []).extend(_means(query))
            if not waits:
                span = sequence.queries.pop((layer, head))
                last = len(keys) - 1 if rolls else start + length - 1
                self._score_span(entries, keys, span, last, _means(sinks))
        else:
            self._score(entries, probabilities, again, length)
        if options["policy"] == "snapkv" and not cached:
            _, _, recent, _ = self.budget(sequence, layer, head)
            seen = probabilities[:, -recent:].sum(axis=(0, 1))
            seen[-recent:] = 0.0  # the window is not to be decided
            pooled = np.convolve(seen, np.full(5, 0.2))[2:-2]
            for entry, rank in zip(entries, pooled, strict=True):
                entry.observed = rank
        if bits and not rounds_first:
            for entry in added:
                self._round(entry, layer, head)
        if not waits:
            entries = self._evict(sequence, layer, head, entries)
        sequence.entries[layer][head] = entries
        return output

    def _sinks(self, layer, head, groups):
        """Return the learned logits of a KV head's query heads; -inf without any."""
        name = f"model.layers.{layer}.self_attn.sinks"
        if name not in self.weights:
            return np.full(groups, -np.inf)
        return self.weights[name][head * groups : (head + 1) * groups]

    def _score(self, entries, probabilities, again, length):
        scoring = self.options["scoring"]
        decay = self.options["decay"] or {"decay": 0.995}.get(scoring, 1.0)
        for number, entry in enumerate(entries):
            received = probabilities[:, :, number]
            if scoring == "last":
                entry.received = received[:, -1].sum()
                continue
            entry.received *= decay**length
            if scoring == "expected" and length > 1:
                entry.received += math.sqrt((again[:, :, number] ** 2).sum())
                continue
            for token in range(length):
                entry.received += received[:, token].sum() * decay ** (length - 1 - token)

    def _score_span(self, entries, keys, queries, last, sinks):
        """Ask the queries of a span again, from behind its end."""
        squares = np.zeros(len(entries))
        for query in queries:
            for vector, sink in zip(query, sinks, strict=True):
                squares += _softmax(keys, self._rotated(vector, last + AHEAD), sink) ** 2
        for entry, square in zip(entries, squares, strict=True):
            if self.options["whole_prompts"]:
                entry.received += math.sqrt(square)
            else:
                entry.received = max(entry.received, math.sqrt(square))

    def score(self, entry, newest):
        if entry.is_pinned:
            return math.inf
        scoring = self.options["scoring"]
        if scoring == "mean":
            return entry.received / (newest - entry.position + 1)
        if scoring in ("value_norm", "expected"):
            return entry.received * np.abs(entry.value).sum()
        return entry.received

    def budget(self, sequence, layer, head):
        """Sinks, heavy hitters, recent tokens and a pattern's tokens."""
        options, length = self.options, sequence.prompt_length
        sink = options["sink"]
        if isinstance(sink, float):
            sink = math.floor(sink * length + 1e-6)
        if options["grows"]:  # of what was read when the head was evicted from last
            length = sequence.num_cut.get((layer, head), length)
            length -= sink * isinstance(options["sink"], float)
        factor = 1.0 if options["layer_budgets"] is None else options["layer_budgets"][layer]
        factor = factor[head] if isinstance(factor, list) else factor

        def tokens(size):
            if isinstance(size, float) and size:
                return max(1, options["min_tokens"], math.floor(size * length + 1e-6))
            return int(size)

        heavy = options["heavy"] * factor
        heavy = tokens(heavy if isinstance(options["heavy"], float) else round(heavy))
        recent = tokens(options["recent"])
        unpinned = heavy + recent
        if options["policy"] == "heavy":
            return sink, unpinned, 0, 0
        if options["policy"] == "recent":
            return sink, 0, unpinned, 0
        if options["policy"] == "sink_recent":
            total, sink = sink + unpinned, sink or 4
            sink = min(sink, total - 1)
            return sink, 0, total - sink, 0
        if options["policy"] == "snapkv":
            return sink, unpinned - max(recent, 1), max(recent, 1), 0
        if options["policy"] in ("strided", "fixed"):
            return sink, 0, unpinned - unpinned // 2, unpinned // 2
        if options["policy"] in ("strided_heavy", "fixed_heavy"):
            return sink, heavy, recent - recent // 2, recent // 2
        return sink, heavy, recent, 0

    def _evict(self, sequence, layer, head, entries):
        sequence.num_cut[layer, head] = entries[-1].position + 1
        sink, heavy, recent, pattern = self.budget(sequence, layer, head)
        surplus = len(entries) - (sink + heavy + recent + pattern)
        if self.options["policy"] == "snapkv" and sequence.num_seen:
            return entries
        if self.options["policy"] == "full" or surplus <= 0:
            return entries
        newest = entries[-1].position
        if self.options["whole_prompts"]:  # what was written since the last block
            written = newest + 1 - sequence.span_starts[layer, head]
            room = heavy + recent + pattern
            pinned = sum(e.is_pinned for e in entries)
            recent = max(recent, min(written, room * 2 // 5, room - pinned))
        ranks = self._ranks(entries, newest, pattern, layer, head)
        order = sorted(
            (ranks[e.position], e.position)
            for e in entries
            if e.position >= sink and e.position <= newest - recent
        )
        if len(order) > surplus and self.options["policy"] not in ("random", "value_extremes"):
            (below, _), (above, _) = order[surplus - 1 : surplus + 1]
            if below != above and above - below < CLOSE_SCORES * max(abs(below), abs(above)):
                raise NearTieError
        gone = {position for _, position in order[:surplus]}
        return [e for e in entries if e.position not in gone]

    def _ranks(self, entries, newest, pattern, layer, head):
        policy = self.options["policy"]
        if policy == "keydiff":
            directions = [e.key / np.linalg.norm(e.key) for e in entries]
            mean = sum(directions)
            # Two keys are equally far from their mean.
            ranks = [-(direction @ mean) / np.linalg.norm(mean) for direction in directions]
            ranks = ranks if len(entries) > 2 else [0.0] * len(entries)
        elif policy == "snapkv":
            ranks = [entry.observed for entry in entries]
        elif policy in ("random", "value_extremes"):
            ranks = [_drawn(layer, head, newest, entry.position) for entry in entries]
            if policy == "value_extremes":
                by_spread = sorted(zip(_spreads(entries), range(len(entries)), strict=True))
                others = len(entries) - len(entries) // 4
                for rank in range(others, len(entries)):
                    (below, _), (above, number) = by_spread[rank - 1 : rank + 1]
                    if rank == others and 0 < above - below < 1e-6 * above:
                        raise NearTieError
                    ranks[number] = 1.0 + rank
        elif policy in ("recent", "sink_recent", "strided", "fixed"):
            ranks = [0.0] * len(entries)
        else:
            ranks = [self.score(entry, newest) for entry in entries]
        rank_by_position = {e.position: rank for e, rank in zip(entries, ranks, strict=True)}
        for entry in entries:
            if entry.is_pinned or (pattern and self._is_in_pattern(entry, newest, pattern)):
                rank_by_position[entry.position] = math.inf
        return rank_by_position

    def _is_in_pattern(self, entry, newest, pattern):
        """Return whether the smallest power of two that fits has this position."""
        cells = min(8, pattern) if self.options["policy"].startswith("fixed") else 1
        stride = 1
        if cells == 1 and self.options["policy"].startswith("strided"):
            while newest // stride + 1 > pattern:
                stride *= 2
            return entry.position % stride == 0
        while (newest // cells + 1) // stride > pattern // cells:
            stride *= 2
        return (entry.position // cells + 1) % stride == 0

    def _round(self, entry, layer, head):
        bits = self.options["kv_bits"]
        if self.transforms is None:
            entry.key = _rounded(entry.key, 4 if bits == 4 else 8)
        else:
            center, scale = (numbers[layer][head] for numbers in self.transforms)
            matrix = _hadamard(len(entry.key))
            transformed = matrix @ ((entry.key - center) / scale)
            entry.key = matrix.T @ _rounded(transformed, bits) * scale + center
        entry.value = _rounded(entry.value, 8 if bits == 8 else 4)

    def scores_by_position(self, sequence, layer, head):
        """Return the score of each entry, by position."""
        newest = sequence.num_seen - 1
        return {e.position: self.score(e, newest) for e in sequence.entries[layer][head]}


def _spreads(entries):
    # Equal tokens have equal values in a first layer, but for the rounding of products.
    return [float(np.float32(entry.value.max() - entry.value.min())) for entry in entries]


def _drawn(layer, head, newest, position):
    """Return the number in [0, 1) that an entry draws, with the finaliser of splitmix64."""

    def mixed(number):
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
            number = number + 0x9E3779B97F4A7C15 if shift == 30 else number
            number %= 2**64
            number = (number ^ (number >> shift)) * factor % 2**64
        return number

    drawn = mixed(mixed(mixed(head + 1024 * layer) + newest) + position)
    return (drawn >> 20) % 2**24 / 2**24


def _means(vectors):
    """Average at most four query heads at a time, of ``[T, G, D]`` or of their sinks ``[G]``."""
    axis = vectors.ndim // 2
    sets = np.array_split(vectors, math.ceil(vectors.shape[axis] / 4), axis)
    return np.stack([heads.mean(axis) for heads in sets], axis)


def _softmax(keys, query, sink):
    logits = keys @ query / math.sqrt(len(query))
    highest = max(logits.max(), sink)
    weights = np.exp(logits - highest)
    return weights / (weights.sum() + np.exp(sink - highest))


def _hadamard(size):
    """Sylvester's matrix, whose signs are the parities of the bits that two indices share."""
    signs = [[bin(row & column).count("1") % 2 for column in range(size)] for row in range(size)]
    return (1 - 2 * np.array(signs)) / math.sqrt(size)


def _rounded(numbers, bits):
    """Numbers as their groups' grids have them (docs/algorithm.md, bits)."""
    size = max(group for group in range(1, 65) if len(numbers) % group == 0)
    levels = 2**bits - 1
    result = []
    for group in numbers.reshape(-1, size):
        low = _to_bf16(group.min(), math.floor)
        scale = _to_bf16((group.max() - low) / levels, math.ceil)
        codes = (group - low) / scale
        if np.any(np.abs(codes - np.floor(codes) - 0.5) < CLOSE_CODES):
            raise NearTieError
        result.append(low + np.clip(np.floor(codes + 0.5), 0, levels) * scale)
    return np.concatenate(result)


def _to_bf16(number, direction):
    """Return the next number of eight significant bits below, or above."""
    if number == 0:
        return 0.0
    unit = 2.0 ** (math.floor(math.log2(abs(number))) - 7)
    steps = number / unit
    if 0 < abs(steps - round(steps)) < CLOSE_CODES:
        raise NearTieError
    return direction(steps) * unit
