"use strict";
// The whole page: controls, keys, and the two panes.

const byId = (id) => document.getElementById(id);

class View {
  constructor(content) {
    this.source = new Source(content);
    this.choice = content.choice;
    this.reading = null;
    this.step = 0;
    this.layer = 0;
    this.head = 0;
    this.timer = null;
    this.top = 1;
    this.panes = [new Pane(this, 0), new Pane(this, 1)];
    this.listen();
  }

  async start() {
    byId("ramp").append(...Array.from({ length: LEVELS }, (_, i) => {
      const cell = document.createElement("i");
      cell.className = `l${i + 1}`;
      return cell;
    }));
    byId("new-tokens").value = this.choice.new_tokens;
    byId("text").value = this.choice.text ?? "";
    byId("beside").checked = Boolean(this.choice.beside);
    byId("export").hidden = this.source.isExport;
    byId("input").hidden = this.source.isExport;
    // In a file there may be nothing to set beside it.
    const { policies, budgets } = this.choice;
    byId("two").hidden = this.source.isExport && policies.length * budgets.length < 2;
    if (this.source.isExport) await this.show(this.source.content.reading);
    else await this.read();
  }

  async read() {
    await this.busy("Reading the text", async () => {
      const added = Number(byId("new-tokens").value) || 0;
      await this.show(await this.source.read(byId("text").value, added));
    });
  }

  async show(reading) {
    this.reading = reading;
    this.readers = new Uint16Array((await unpack(reading.readers)).buffer);
    const words = `${reading.tokens.length} tokens`;
    const added = reading.tokens.length - reading.given;
    byId("about").textContent =
      `Model ${reading.model}, ${words}${added ? `, the last ${added} of them its own` : ""}.`;
    this.layer = Math.max(0, reading.layers.indexOf(this.choice.layer));
    this.head = this.choice.head;
    fill(byId("layer"), reading.layers.map((name, place) => [String(place), String(name)]));
    fill(byId("head"), Array.from({ length: reading.heads }, (_, i) => [String(i), String(i)]));
    byId("step").max = reading.tokens.length - 1;
    for (const pane of this.panes) pane.write(reading, this.choice);
    this.panes[0].policy.value = this.choice.policy;
    this.panes[1].policy.value = this.choice.beside || this.choice.other;
    for (const pane of this.panes) [pane.budget.value] = this.choice.budgets;
    this.step = Math.min(reading.tokens.length - 1, Math.floor(reading.tokens.length / 2));
    byId("viewer").hidden = false;
    await this.arrange();
  }

  async arrange() {
    const two = byId("beside").checked;
    byId("texts").classList.toggle("two", two);
    byId("texts").replaceChildren(...this.panes.slice(0, two ? 2 : 1).map((pane) => pane.root));
    await this.load(this.active());
  }

  active() {
    return this.panes.slice(0, byId("beside").checked ? 2 : 1);
  }

  async choose(pane) {
    await this.load([pane]);
  }

  async load(panes) {
    await this.busy("Following the policy", async () => {
      for (const pane of panes) {
        const [wanted, budget] = [pane.policy.value, pane.budget.value.trim()];
        const trace = await this.source.trace(this.reading, wanted, budget);
        // Whoever chose again meanwhile gets the later choice.
        if (pane.policy.value === wanted && pane.budget.value.trim() === budget) pane.trace = trace;
      }
      await this.openLayer();
    });
  }

  async openLayer() {
    for (const pane of this.active()) await pane.trace?.openLayer(this.layer);
    this.findTop();
    this.paint();
  }

  // The highest score that is shown, so that both panes have the same colours.
  findTop() {
    let level = 1;
    for (const { trace } of this.active()) {
      const scores = trace?.layerScores.get(this.layer) ?? [];
      for (let i = 0; i < scores.length; i += 1) if (scores[i] > level) level = scores[i];
      if (trace) this.top = trace.scoreOf(level);
    }
    byId("ramp-low").textContent = (this.top / 1000).toPrecision(2);
    byId("ramp-high").textContent = this.top.toPrecision(3);
  }

  // The later tokens that look most at one, by this head and with full attention; 65,535: none.
  readersOf(token) {
    const { heads, tokens } = this.reading;
    const start = ((this.layer * heads + this.head) * tokens.length + token) * 3;
    return [...this.readers.subarray(start, start + 3)].filter((query) => query < 65535);
  }

  // Ten levels over three powers of ten.
  levelOf(score) {
    if (score <= 0) return 0;
    const place = 1 + Math.log10(score / this.top) / 3;
    return Math.max(1, Math.min(LEVELS, Math.ceil(place * LEVELS)));
  }

  paint() {
    const { reading, step } = this;
    byId("step").value = step;
    byId("layer").value = String(this.layer);
    byId("head").value = String(this.head);
    const words = `Step ${step + 1} of ${reading.tokens.length}: ${shown(reading.tokens[step])}`;
    byId("step-text").textContent = words;
    byId("step").setAttribute("aria-valuetext", words);
    for (const pane of this.active()) pane.paint();
  }

  go(step) {
    if (!this.reading) return;
    this.step = Math.max(0, Math.min(this.reading.tokens.length - 1, step));
    if (!this.waiting) {
      this.waiting = true;
      // Many moves of the slider between two frames cost one repaint.
      requestAnimationFrame(() => {
        this.waiting = false;
        this.paint();
      });
    }
  }

  async setHead(layer, head) {
    const { layers, heads } = this.reading;
    this.layer = (layer + layers.length) % layers.length;
    this.head = (head + heads) % heads;
    await this.openLayer();
  }

  play() {
    const playing = this.timer === null;
    byId("play").setAttribute("aria-pressed", String(playing));
    byId("play").textContent = playing ? "Pause" : "Play";
    if (!playing) {
      clearInterval(this.timer);
      this.timer = null;
      return;
    }
    if (this.step === this.reading.tokens.length - 1) this.go(0);
    this.timer = setInterval(() => {
      if (this.step >= this.reading.tokens.length - 1) this.play();
      else this.go(this.step + 1);
    }, 120);
  }

  async busy(words, work) {
    const message = byId("message");
    message.textContent = this.source.isExport ? "" : `${words} …`;
    let [began, before] = [performance.now(), 0];
    const poll = this.source.isExport ? null : setInterval(async () => {
      const { share } = await this.source.ask("api/progress").catch(() => ({ share: 0 }));
      if (!message.textContent) return;
      if (share < before) began = performance.now();
      before = share;
      const seconds = ((performance.now() - began) / 1000) * (1 / share - 1);
      const left = share > 0.02 ? `, about ${Math.ceil(seconds)} s left` : "";
      message.textContent = `${words} … ${Math.round(100 * share)} %${left}`;
    }, 700);
    try {
      await work();
      message.textContent = "";
    } catch (error) {
      message.textContent = error.message;
    } finally {
      if (poll !== null) clearInterval(poll);
    }
  }

  // The page with the traces that are open, as one file.
  save() {
    const packed = [...this.source.open.values()].map((trace) => trace.packed);
    const budgeted = packed.filter((trace) => trace.policy !== "full");
    const budgets = [...new Set((budgeted.length ? budgeted : packed).map((t) => t.budget))];
    const policies = [...new Set(packed.map((trace) => trace.policy))];
    const complete = policies.every((policy) =>
      budgets.every((budget) => packed.some((t) => isTrace(t, policy, budget))));
    const choice = {
      ...this.choice,
      // Only what is in the file can be chosen in it.
      policies: complete ? policies : [this.panes[0].policy.value],
      budgets: complete ? budgets : [this.panes[0].budget.value],
      policy: this.panes[0].policy.value,
      other: complete ? this.panes[1].policy.value : this.panes[0].policy.value,
      beside: byId("beside").checked && complete ? this.panes[1].policy.value : "",
      layer: this.reading.layers[this.layer],
      head: this.head,
      text: "",
    };
    const content = JSON.stringify({ choice, reading: this.reading, traces: packed });
    const copy = original.cloneNode(true);
    copy.querySelector("#content").textContent = content.replaceAll("<", "\\u003c");
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([`<!doctype html>\n${copy.outerHTML}`], { type: "text/html" }));
    link.download = "kept.html";
    link.click();
    URL.revokeObjectURL(link.href);
  }

  listen() {
    byId("input").addEventListener("submit", (event) => {
      event.preventDefault();
      this.read();
    });
    byId("file").addEventListener("change", async (event) => {
      const [file] = event.target.files;
      if (file) byId("text").value = await file.text();
    });
    byId("step").addEventListener("input", (event) => this.go(Number(event.target.value)));
    byId("layer").addEventListener("change", (event) => this.setHead(Number(event.target.value), this.head));
    byId("head").addEventListener("change", (event) => this.setHead(this.layer, Number(event.target.value)));
    byId("beside").addEventListener("change", () => this.arrange());
    byId("export").addEventListener("click", () => this.save());
    byId("first").addEventListener("click", () => this.go(0));
    byId("back").addEventListener("click", () => this.go(this.step - 1));
    byId("forward").addEventListener("click", () => this.go(this.step + 1));
    byId("last").addEventListener("click", () => this.go(this.reading.tokens.length - 1));
    byId("play").addEventListener("click", () => this.play());
    document.addEventListener("keydown", (event) => this.onKey(event));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.paint());
  }

  onKey(event) {
    if (!this.reading || event.altKey || event.ctrlKey || event.metaKey) return;
    const target = event.target;
    if (target.matches("textarea, select, input:not([type=range]):not([type=checkbox])")) return;
    const isButton = target.matches("button, input[type=checkbox]");
    const by = event.shiftKey ? 20 : 1;
    const turn = event.shiftKey ? -1 : 1;
    const actions = {
      arrowleft: () => this.go(this.step - by),
      arrowright: () => this.go(this.step + by),
      home: () => this.go(0),
      end: () => this.go(this.reading.tokens.length - 1),
      l: () => this.setHead(this.layer + turn, this.head),
      h: () => this.setHead(this.layer, this.head + turn),
      p: () => {
        const { policy } = this.panes[0];
        const count = policy.options.length;
        policy.selectedIndex = (policy.selectedIndex + turn + count) % count;
        this.choose(this.panes[0]);
      },
      b: () => byId("beside").click(),
    };
    if (!isButton) actions[" "] = () => this.play();
    const action = actions[event.key.toLowerCase()];
    if (action) {
      event.preventDefault();
      action();
    }
  }
}

// Kept before anything is drawn, for "Save this page".
const original = document.documentElement.cloneNode(true);
const view = new View(JSON.parse(byId("content").textContent));
view.start();
