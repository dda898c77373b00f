// What the cache holds of a conversation: found in the text that is shown, and drawn over it.

const LEVELS = [
  ["none", "evicted"], ["few", "by less than a third"], ["some", "by some"],
  ["most", "by two thirds or more"], ["all", "by all"],
];

class Kept {
  tokens = [];
  counts = [];

  /** Takes a report of the server, which tells each token's text once. */
  take(report) {
    // The first one comes when one new token has been through the cache.
    this.numPrompt ??= report.kept.length - 1;
    this.tokens = this.tokens.concat(report.tokens);
    this.counts = report.kept;
    this.numHeads = report.num_heads;
    this.bytes = report.cache_bytes;
    this.fullBytes = report.full_bytes;
  }

  get isWhole() { return this.counts.every((count) => count === this.numHeads); }

  level(index) {
    const fraction = this.counts[index] / this.numHeads;
    if (fraction === 0 || fraction === 1) { return fraction * 4; }
    return fraction >= 2 / 3 ? 3 : fraction < 1 / 3 ? 1 : 2;
  }

  /** The part of the entries of a stretch of text that all heads together hold. */
  fraction(from, to) {
    let end = 0, tokens = 0, held = 0;
    for (const [index, token] of this.tokens.entries()) {
      end += token.length;
      if (end > from && end <= to && index < this.counts.length) {
        tokens += 1;
        held += this.counts[index];
      }
    }
    return tokens ? held / (tokens * this.numHeads) : undefined;
  }

  /** Where the text of each message begins in the text of all tokens, the answer's last. */
  starts(messages, answer) {
    const text = this.tokens.join(""), found = new Map();
    const lead = (one) => one.length - one.trimStart().length;
    let from = 0;
    for (const message of messages) {
      const core = message.content.trim(), at = core ? text.indexOf(core, from) : -1;
      if (at < 0) { continue; }
      found.set(message, at - lead(message.content));
      from = at + core.length;
    }
    const end = this.tokens.slice(0, this.numPrompt).join("").length;
    return found.set(answer, end + lead(text.slice(end)) - lead(answer.content));
  }
}

/** The text nodes that know where their text is in a message. */
function* leaves(element) {
  const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    if (walker.currentNode.at !== undefined) { yield walker.currentNode; }
  }
}

/** Draws what is kept over messages; `bodies` has the element of each one's text. */
function paintKept(kept, starts, bodies) {
  const ranges = LEVELS.map(() => []), ends = [];
  for (const token of kept?.tokens || []) { ends.push((ends.at(-1) || 0) + token.length); }
  for (const [message, start] of starts) {
    for (const node of bodies.get(message) ? leaves(bodies.get(message)) : []) {
      const base = start + node.at, stop = base + node.length;
      let here = base, index = firstAbove(ends, here);
      while (here < stop && index < ends.length) {
        const level = kept.level(index);
        while (index < ends.length && ends[index] < stop && kept.level(index) === level) { index += 1; }
        const sameToEnd = index < ends.length && kept.level(index) === level;
        const end = Math.min(stop, sameToEnd ? ends[index] : ends[index - 1]);
        ranges[level].push(new StaticRange({
          startContainer: node, startOffset: here - base, endContainer: node, endOffset: end - base,
        }));
        here = end;
      }
    }
  }
  ranges.forEach((own, level) => {
    const highlight = CSS.highlights && new Highlight();
    for (const range of highlight ? own : []) { highlight.add(range); }
    CSS.highlights?.set(`kept-${level}`, highlight);
  });
}

/** The first place of a sorted list with more than a value. */
function firstAbove(sorted, value) {
  let low = 0, high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] > value) { high = middle; } else { low = middle + 1; }
  }
  return low;
}
