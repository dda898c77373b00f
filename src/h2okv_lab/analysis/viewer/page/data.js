"use strict";
// What the page knows: the text, and for each policy when a token went and what it had received.

async function unpack(blob) {
  const bytes = Uint8Array.from(atob(blob), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

class Trace {
  // packed: what viewer/reading.py makes; goneBytes: its unpacked "gone".
  constructor(packed, goneBytes, reading) {
    this.packed = packed;
    this.reading = reading;
    this.length = reading.tokens.length;
    this.gone = new Uint16Array(goneBytes.buffer);
    this.steps = packed.steps;
    this.layerScores = new Map();
    this.offsets = [];
    let offset = 0;
    for (const step of this.steps) {
      this.offsets.push(offset);
      offset += reading.heads * (step + 1);
    }
    const loss = [0];
    const known = [0];
    packed.losses.forEach((value) => {
      loss.push(loss.at(-1) + (value ?? 0));
      known.push(known.at(-1) + (value === null ? 0 : 1));
    });
    this.lossSum = loss;
    this.lossCount = known;
  }

  static async open(packed, reading) {
    return new Trace(packed, await unpack(packed.gone), reading);
  }

  async openLayer(layer) {
    if (!this.layerScores.has(layer)) {
      this.layerScores.set(layer, await unpack(this.packed.scores[layer]));
    }
  }

  // The first query that does not see each token; layer and head are places, not names.
  goneAt(layer, head) {
    const start = (layer * this.reading.heads + head) * this.length;
    return this.gone.subarray(start, start + this.length);
  }

  // Level 0 to 255 of a recorded step.
  level(scores, place, head, token) {
    const width = this.steps[place] + 1;
    return token < width ? scores[this.offsets[place] + head * width + token] : 0;
  }

  scoreOf(level) {
    const { lowest, highest } = this.reading;
    return level === 0 ? 0 : lowest * (highest / lowest) ** ((level - 1) / 254);
  }

  // A function of the token that gives its score at a step: exact at recorded steps, else on the
  // straight line between two, from its arrival and up to its eviction.
  scorer(layer, head, step) {
    const scores = this.layerScores.get(layer);
    const gone = this.goneAt(layer, head);
    let after = this.steps.findIndex((recorded) => recorded >= step);
    if (after < 0) after = this.steps.length - 1;
    const before = this.steps[after] === step ? after : after - 1;
    return (token) => {
      if (token > step) return 0;
      const end = this.scoreOf(this.level(scores, after, head, token));
      if (before === after) return end;
      const start = before < 0 ? 0 : this.scoreOf(this.level(scores, before, head, token));
      const from = Math.max(token - 1, before < 0 ? -1 : this.steps[before]);
      const to = Math.min(this.steps[after], gone[token] - 1);
      if (step >= to) return end;
      return start + ((end - start) * (step - from)) / (to - from);
    };
  }

  // The place of a token among those that a cut at this step may evict; null where it is
  // protected or gone. Scores come in 255 levels, so places of near equals are not exact.
  standing(layer, head, step, token) {
    const { sink, recent, heavy, policy } = this.packed;
    const gone = this.goneAt(layer, head);
    if (policy === "full" || gone[token] <= step) return null;
    if (token < sink || token > step - recent) return null;
    const score = this.scorer(layer, head, step);
    const ranked = [];
    for (let i = sink; i <= step - recent; i += 1) if (gone[i] > step) ranked.push(score(i));
    ranked.sort((a, b) => a - b);
    const threshold = heavy && ranked.length > heavy ? ranked[ranked.length - heavy] : null;
    const lower = ranked.filter((other) => other < score(token)).length;
    return { rank: 1 + lower, count: ranked.length, threshold };
  }

  bytesAt(step) {
    let held = null;
    for (const [at, bytes] of this.packed.bytes) if (at <= step) held = bytes;
    return held;
  }

  fullBytesAt(step) {
    return (this.packed.full_bytes / this.length) * (step + 1);
  }

  perplexityAt(step) {
    const count = this.lossCount[step + 1];
    return count ? Math.exp(this.lossSum[step + 1] / count) : null;
  }
}

// Whether a packed trace is that of a policy and budget; a full cache has no budget.
function isTrace(packed, policy, budget) {
  return packed.policy === policy && (policy === "full" || packed.budget === budget);
}

// Where traces come from: the page itself (an export), or the server on this machine.
class Source {
  constructor(content) {
    this.content = content;
    this.isExport = Boolean(content.reading);
    this.open = new Map();
  }

  async ask(path, options) {
    const answer = await fetch(path, options);
    const found = await answer.json();
    if (!answer.ok) throw new Error(found.error);
    return found;
  }

  async read(text, newTokens) {
    this.open.clear();
    const body = JSON.stringify({ text, new_tokens: newTokens });
    return this.ask("api/text", { method: "POST", body });
  }

  async trace(reading, policy, budget) {
    const key = policy === "full" ? policy : `${policy} ${budget}`;
    if (!this.open.has(key)) {
      let packed;
      if (this.isExport) {
        packed = this.content.traces.find((t) => isTrace(t, policy, budget));
      } else {
        const query = new URLSearchParams({ text: reading.id, policy, budget });
        packed = await this.ask(`api/trace?${query}`);
      }
      this.open.set(key, await Trace.open(packed, reading));
    }
    return this.open.get(key);
  }
}
