"use strict";
// One policy's side of the page: its text, coloured, and what it costs.

const LEVELS = 10;

function inKiB(bytes) {
  const kib = bytes / 1024;
  return kib < 1024 ? `${kib.toFixed(0)} KiB` : `${(kib / 1024).toFixed(2)} MiB`;
}

function shown(piece) {
  return piece.trim() ? `“${piece.trim()}”` : "a space or line end";
}

class Pane {
  constructor(view, place) {
    this.view = view;
    this.place = place;
    this.root = document.getElementById("pane").content.firstElementChild.cloneNode(true);
    this.tokens = this.root.querySelector(".tokens");
    this.policy = this.root.querySelector(".policy");
    this.budget = this.root.querySelector(".budget");
    if (!view.source.isExport) {
      this.budget = Object.assign(document.createElement("input"), {
        type: "text", className: "budget", size: 7, title: "Tokens (512), part of the text (20%)",
      });
      this.root.querySelector(".budget").replaceWith(this.budget);
    }
    this.map = new HeadMap(this.root.querySelector(".map"), view);
    this.trace = null;
    this.chosen = null;
    this.policy.addEventListener("change", () => view.choose(this));
    this.budget.addEventListener("change", () => view.choose(this));
    this.tokens.addEventListener("click", (event) => {
      const index = this.spans.indexOf(event.target);
      if (index >= 0) this.inspect(index);
    });
    this.tokens.addEventListener("keydown", (event) => this.onKey(event));
  }

  write(reading, choice) {
    fill(this.policy, choice.policies.map((name) => [name, name]), this.policy.value);
    // An export holds some budgets; otherwise any can be asked for.
    if (this.view.source.isExport) {
      fill(this.budget, choice.budgets.map((text) => [text, text]), this.budget.value);
    }
    this.tokens.setAttribute("aria-label", `Text ${this.place + 1}; arrows choose a token`);
    this.spans = reading.tokens.map((piece, index) => {
      const span = document.createElement("span");
      span.textContent = piece;
      span.className = "t unread";
      if (index === reading.given) span.classList.add("given-end");
      return span;
    });
    this.painted = new Array(this.spans.length).fill("t unread");
    this.tokens.replaceChildren(...this.paragraphs());
    this.chosen = null;
  }

  // The spans in blocks that end with a line.
  paragraphs() {
    const blocks = [];
    let block = document.createElement("div");
    this.spans.forEach((span, index) => {
      block.append(span);
      const text = span.textContent;
      const next = this.spans[index + 1]?.textContent ?? "";
      if (text.endsWith("\n") && !next.startsWith("\n")) {
        blocks.push(block);
        block = document.createElement("div");
      }
    });
    return [...blocks, block];
  }

  // Repaints what has changed since the last time.
  paint() {
    const { view, trace } = this;
    // A choice may still be loading.
    if (!trace?.layerScores.has(view.layer)) return;
    const { layer, head, step } = view;
    const gone = trace.goneAt(layer, head);
    const score = trace.scorer(layer, head, step);
    const { sink, recent } = trace.packed;
    const evicts = trace.packed.policy !== "full";
    const counts = { held: 0, leaving: 0 };
    for (let token = 0; token < this.spans.length; token += 1) {
      let name;
      if (token > step) name = "t unread";
      else if (gone[token] <= step) name = "t gone";
      else {
        name = `t l${view.levelOf(score(token))}`;
        if (gone[token] === step + 1) {
          name += " leaving";
          counts.leaving += 1;
        } else counts.held += 1;
        if (evicts && token < sink) name += " sink";
        else if (evicts && token > step - recent) name += " recent";
        if (token === step) name += " now";
      }
      if (token === view.reading.given) name += " given-end";
      if (token === this.chosen) name += " chosen";
      if (name !== this.painted[token]) {
        this.spans[token].className = name;
        this.painted[token] = name;
      }
    }
    this.follow(this.spans[step]);
    this.tell(counts);
    this.map.paint(trace);
    this.drawArrows();
    if (this.chosen !== null) this.describe();
  }

  // From the chosen token to those that look at it; as wide as the text and scrolled with it.
  drawArrows() {
    this.arrows?.remove();
    const readers = this.chosen === null ? [] : this.view.readersOf(this.chosen);
    const drawn = readers.filter((query) => query <= this.view.step);
    if (!drawn.length) return;
    const { tokens } = this;
    const box = tokens.getBoundingClientRect();
    const middle = (span) => {
      const own = span.getBoundingClientRect();
      return [(own.left + own.right) / 2 - box.left, own.top - box.top + tokens.scrollTop];
    };
    const [x, y] = middle(this.spans[this.chosen]);
    const paths = drawn.map((query) => {
      const [toX, toY] = middle(this.spans[query]);
      const lift = Math.min(y, toY) - 26;
      return `<path d="M${x} ${y} C${x} ${lift} ${toX} ${lift} ${toX} ${toY}"/>`;
    });
    this.arrows = document.createElement("div");
    this.arrows.className = "arrows";
    this.arrows.innerHTML =
      `<svg width="100%" height="${tokens.scrollHeight - 12}" aria-hidden="true"><defs>` +
      '<marker id="tip" markerWidth="7" markerHeight="6" refX="6" refY="3" orient="auto">' +
      `<path d="M0 0L7 3L0 6"/></marker></defs>${paths.join("")}</svg>`;
    tokens.append(this.arrows);
  }

  tell(counts) {
    const { trace, view } = this;
    const { step } = view;
    const { packed } = trace;
    const full = trace.fullBytesAt(step);
    const held = trace.bytesAt(step);
    const share = held === null ? null : held / full;
    const bar = this.root.querySelector(".bar .held");
    bar.style.width = `${Math.min(100, 100 * (held ?? full) / trace.packed.full_bytes)}%`;
    const percent = share === null ? "" : `, ${(100 * share).toFixed(0)} %`;
    this.root.querySelector(".bytes-text").textContent = held === null
      ? `The first ${packed.first} tokens are read at once; a full cache takes ${inKiB(full)} here.`
      : `This cache takes ${inKiB(held)}, a full one ${inKiB(full)} (all layers and heads${percent}).`;
    const budget = packed.policy === "full"
      ? "keeps everything"
      : `budget ${packed.sink + packed.heavy + packed.recent}` +
        `${packed.budget.includes("%") ? ` (${packed.budget} of all ${view.reading.tokens.length})` : ""} = ` +
        `${packed.sink} sink + ${packed.heavy} heavy + ${packed.recent} recent` +
        `${packed.block > 1 ? `; evicts after every ${packed.block} tokens` : ""}`;
    this.root.querySelector(".counts").textContent =
      `This head keeps ${counts.held} of ${step + 1} tokens` +
      `${counts.leaving ? `, ${counts.leaving} evicted now` : ""} (${budget}).`;
    const perplexity = trace.perplexityAt(step);
    const next = view.reading.tokens[step + 1];
    const guess = step < packed.first - 1 ? null : packed.next[step];
    this.root.querySelector(".foresight").textContent =
      (guess === null ? "" : `Predicts ${shown(guess)} next`) +
      (guess === null ? "" : next === undefined ? ". " : `; the text has ${shown(next)}. `) +
      (perplexity === null ? "" : `Perplexity so far ${perplexity.toFixed(2)}.`);
  }

  // Scrolls the text, never the page, so that the newest token is seen.
  follow(span) {
    const { tokens } = this;
    const box = tokens.getBoundingClientRect();
    const { top, bottom } = span.getBoundingClientRect();
    if (top < box.top || bottom > box.bottom) {
      tokens.scrollTop += (top + bottom - box.top - box.bottom) / 2;
    }
  }

  inspect(index) {
    this.chosen = Math.max(0, Math.min(this.spans.length - 1, index));
    this.spans[this.chosen].scrollIntoView({ block: "nearest" });
    this.paint();
  }

  describe() {
    const { view, trace, chosen } = this;
    const { layer, head, step } = view;
    const gone = trace.goneAt(layer, head)[chosen];
    const heads = view.reading.layers.length * view.reading.heads;
    let holding = 0;
    for (let i = 0; i < heads; i += 1) {
      if (chosen <= step && trace.gone[i * trace.length + chosen] > step + 1) holding += 1;
    }
    const score = trace.scorer(layer, head, step)(chosen);
    const readers = view.readersOf(chosen).filter((query) => query <= step);
    const asked = readers.map((query) => `${shown(view.reading.tokens[query])} (${query + 1})`);
    const standing = trace.standing(layer, head, step, chosen);
    const place = standing === null ? "" : `, about ${standing.rank} of ${standing.count} to leave` +
      (standing.threshold === null ? "" : ` (scores from ${standing.threshold.toFixed(2)} stay)`);
    const fate = gone > trace.length ? "held to the end" : `evicted at step ${gone}`;
    document.getElementById("detail").textContent =
      `Token ${chosen + 1}, ${shown(view.reading.tokens[chosen])}, with ${trace.packed.policy}: ` +
      (chosen > step
        ? "not read yet."
        : `score ${score.toFixed(2)}${place}; this head: ${fate}; ${holding} of ${heads} heads hold it.` +
          (asked.length ? ` Looked at most by ${asked.join(", ")}.` : ""));
  }

  onKey(event) {
    const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -10, ArrowDown: 10 };
    if (!(event.key in moves) || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    event.stopPropagation();
    this.inspect((this.chosen ?? this.view.step) + (this.chosen === null ? 0 : moves[event.key]));
  }
}

function fill(select, options, before) {
  select.replaceChildren(
    ...options.map(([value, label]) => {
      const option = document.createElement("option");
      option.value = value;
      option.textContent = label;
      return option;
    }),
  );
  if (options.some(([value]) => value === before)) select.value = before;
}
