// The conversation: what is said, asked of the server, shown and remembered.

const at = (id) => document.getElementById(id);
const number = (n) => n.toLocaleString("en", { maximumFractionDigits: 1 });
const bytes = (n) => n < 2 ** 20 ? `${number(n / 1024)} KiB` : `${number(n / 2 ** 20)} MiB`;
const STARTERS = [
  "Explain how a rainbow forms, step by step.",
  "Write a short story about a lighthouse keeper and a fox.",
  "Give me a table of three planets with their size and number of moons.",
];
const SETTINGS = ["system", "temperature", "top_p", "max_tokens", "budget"];
// Where neither the user nor the model says anything; small models write nonsense at 1.
const STANDARD = { temperature: 0.6, top_p: 0.9, max_tokens: 512 };
const MOST_CHATS = 50;

function remembered(name, otherwise) {
  try { return JSON.parse(localStorage.getItem(name)) ?? otherwise; } catch { return otherwise; }
}

function remember(name, value) {
  // Where nothing can be kept, or no more, the page still works.
  try { localStorage.setItem(name, JSON.stringify(value)); } catch { /* nothing to do */ }
}

const settings = { ...Object.fromEntries(SETTINGS.map((name) => [name, ""])), colours: true, ...remembered("h2okv-settings", {}) };
let chats = remembered("h2okv-chats", []);
let chat = newChat();
let stats = null;
let running = null;  // the answer that comes, and what stops it
let chosen = null;  // the answer whose cache is drawn
const caches = new WeakMap();  // of each answer
const bodies = new Map();  // where each message's text is shown

function newChat() { return { id: Date.now(), messages: [] }; }

function button(text, pressed) {
  const element = make("button", text);
  element.type = "button";
  element.addEventListener("click", pressed);
  return element;
}

// -- what is shown

function shown() {
  const system = settings.system.trim();
  return system ? [{ role: "system", content: system }, ...chat.messages] : chat.messages;
}

function showAll() {
  bodies.clear();
  at("talk").replaceChildren(...shown().map(article));
  at("welcome").hidden = chat.messages.length > 0;
  chosen = chat.messages.findLast((message) => caches.has(message)) || null;
  showTools();
  paint();
  at("main").scrollTop = at("main").scrollHeight;
}

function article(message) {
  const who = { user: "You", assistant: stats?.model || "Model", system: "System prompt" };
  const body = make("div"), note = make("p"), tools = make("div");
  [body.className, note.className, tools.className] = ["said", "note", "tools"];
  const element = make("article", make("h3", who[message.role]), body, note, tools);
  element.className = message.role;
  bodies.set(message, body);
  showText(message);
  return element;
}

function showText(message) {
  const body = bodies.get(message);
  if (message.role === "assistant") { renderMarkdown(body, message.content); }
  else {
    const node = document.createTextNode(message.content);
    node.at = 0;
    body.replaceChildren(node);
  }
  body.nextSibling.textContent = message.note || "";
  body.nextSibling.hidden = !message.note;
}

function showTools() {
  for (const [message, body] of bodies) {
    const own = [];
    if (running || message.role === "system") { /* none */ }
    else if (message.role === "user") { own.push(button("Edit", () => edit(message))); }
    else {
      own.push(button("Copy", () => copy(message)));
      if (message === chat.messages.at(-1)) { own.push(button("Try again", () => tryAgain(message))); }
      if (caches.has(message) && settings.colours) {
        const choose = button("Colours of this answer", () => { chosen = message; showTools(); paint(); });
        choose.setAttribute("aria-pressed", message === chosen);
        own.push(choose);
      }
    }
    body.parentElement.querySelector(".tools").replaceChildren(...own);
  }
}

function memoryLine(kept) {
  if (!kept?.numHeads) { return ""; }
  const held = `KV memory ${bytes(kept.bytes)}`;
  return kept.isWhole ? `${held}, nothing evicted yet` : `${held}, a full cache would be ${bytes(kept.fullBytes)}`;
}

/** Draws what the chosen answer's cache holds, and says it in numbers. */
function paint() {
  const kept = settings.colours && chosen ? caches.get(chosen) : null;
  at("legend").hidden = !kept?.numHeads;
  if (!kept?.numHeads) { paintKept(null, [], bodies); return; }
  const messages = shown();
  paintKept(kept, kept.starts(messages.slice(0, messages.indexOf(chosen)), chosen), bodies);
  const totals = LEVELS.map(() => 0);
  kept.counts.forEach((_, index) => { totals[kept.level(index)] += 1; });
  at("levels").replaceChildren(...LEVELS.map(([name], level) => {
    const box = make("span", `${name} `, make("b", number(totals[level])));
    box.className = `l${level}`;
    box.title = `tokens held ${LEVELS[level][1]}`;
    return box;
  }).reverse());
  at("heads").textContent = number(kept.numHeads);
}

function follow(change) {
  const main = at("main"), isLow = main.scrollHeight - main.scrollTop - main.clientHeight < 60;
  change();
  if (isLow) { main.scrollTop = main.scrollHeight; }
}

// -- what is asked

function headers() {
  const key = at("key").value.trim();
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function failure(response) {
  try { return (await response.json()).error.message; } catch { return `HTTP ${response.status}`; }
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { value, done } = await reader.read();
    if (done) { return; }
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data !== "[DONE]") { yield JSON.parse(data); }
    }
  }
}

function standard(name) {
  if (name === "max_tokens") { return Math.min(STANDARD[name], stats.max_new_tokens); }
  return stats.sampling[name] ?? STANDARD[name];
}

function request(messages) {
  const told = messages.map(({ role, content }) => ({ role, content }));
  const body = { model: stats.model, messages: told, stream: true, stream_options: { include_usage: true } };
  for (const name of Object.keys(STANDARD)) { body[name] = Number(settings[name] || standard(name)); }
  const budget = Number(settings.budget), heavy = Math.floor(budget / 2);
  // A long conversation is told more rarely, or it would be more to send than the answer.
  const held = chosen ? caches.get(chosen).counts.length : 0;
  body.h2o = { kept_every: Math.max(4, Math.ceil(held / 500)) };
  if (budget) { Object.assign(body.h2o, { heavy, recent: budget - heavy, sink: 0 }); }
  return body;
}

async function ask() {
  at("said").textContent = "";
  const answer = { role: "assistant", content: "" }, stopper = new AbortController();
  const messages = shown(), kept = new Kept();
  running = { stopper };
  at("talk").setAttribute("aria-busy", "true");
  chat.messages.push(answer);
  follow(() => at("talk").append(article(answer)));
  bodies.get(answer).parentElement.setAttribute("aria-busy", "true");
  showTools();
  showRunning();
  let frame = 0, usage = null, begin = 0;
  const draw = () => follow(() => {
    frame = 0;
    const seconds = (performance.now() - begin) / 1000, made = (usage?.completion_tokens || 0) - 1;
    const speed = made > 0 ? `${number(made / seconds)} tokens/s` : "";
    answer.note = [memoryLine(kept), speed].filter(Boolean).join(" · ");
    showText(answer);
    paint();
  });
  try {
    if (!stats) { await refresh(); }
    const response = await fetch("v1/chat/completions", {
      method: "POST", body: JSON.stringify(request(messages)), signal: stopper.signal,
      headers: { "Content-Type": "application/json", ...headers() },
    });
    if (!response.ok) { throw new Error(await failure(response)); }
    for await (const event of events(response)) {
      if (event.error) { throw new Error(event.error.message); }
      begin ||= performance.now();
      const choice = event.choices[0];
      answer.content += choice?.delta.content || "";
      usage = event.usage || usage;
      if (choice?.h2o) {
        kept.take(choice.h2o);
        caches.set(answer, kept);
        chosen = answer;
      }
      frame ||= requestAnimationFrame(draw);
    }
    at("status").textContent = "";
  } catch (error) {
    const isStop = error.name === "AbortError";
    at("status").textContent = isStop ? "Stopped." : "";
    if (!isStop) { at("said").textContent = error.message; }
  }
  cancelAnimationFrame(frame);
  draw();
  follow(() => finish(answer));
}

function finish(answer) {
  running = null;
  at("talk").setAttribute("aria-busy", "false");
  bodies.get(answer).parentElement.setAttribute("aria-busy", "false");
  if (answer.content) { showTools(); }
  else {  // what was asked can be asked again, in other words
    chat.messages.pop();
    edit(chat.messages.at(-1));
  }
  showRunning();
  save();
}

function showRunning() {
  at("go").hidden = Boolean(running);
  at("stop").hidden = !running;
  if (running) { at("status").textContent = "The answer is being written; Esc stops it."; }
  at("new").disabled = at("open-chats").disabled = Boolean(running);
}

function say(text) {
  if (running || !text.trim()) { return; }
  const message = { role: "user", content: text.trim() };
  if (!chat.messages.length) { showAll(); }
  chat.messages.push(message);
  at("welcome").hidden = true;
  at("talk").append(article(message));
  at("main").scrollTop = at("main").scrollHeight;
  at("prompt").value = "";
  fit();
  if (!isTouch()) { at("prompt").focus(); }  // elsewhere it would bring the keyboard back
  ask();
}

function edit(message) {
  chat.messages.splice(chat.messages.indexOf(message));
  showAll();
  at("prompt").value ||= message.content;
  fit();
  at("prompt").focus();
}

function tryAgain(message) {
  chat.messages.splice(chat.messages.indexOf(message));
  showAll();
  ask();
  at("stop").focus();
}

async function copy(message) {
  try {
    await navigator.clipboard.writeText(message.content);
    at("status").textContent = "Copied.";
  } catch { at("said").textContent = "The browser does not let this page copy; select the text."; }
}

// -- what is remembered

function save() {
  const others = chats.filter((one) => one.id !== chat.id);
  chats = chat.messages.length ? [chat, ...others].slice(0, MOST_CHATS) : others;
  remember("h2okv-chats", chats);
}

function open(other) {
  chat = other;
  at("chats").close();
  at("said").textContent = at("status").textContent = "";
  showAll();
  at("prompt").focus();
}

function showChats() {
  at("list").replaceChildren(...chats.map((one) => {
    const title = button(one.messages[0].content.slice(0, 60), () => open(one));
    title.setAttribute("aria-current", one === chat);
    const remove = button("Delete", () => {
      chats = chats.filter((other) => other !== one);
      remember("h2okv-chats", chats);
      if (one === chat) { open(newChat()); } else { showChats(); }
    });
    remove.setAttribute("aria-label", `Delete: ${title.textContent}`);
    return make("li", title, remove);
  }));
}

// -- settings

async function refresh() {
  try {
    const response = await fetch("stats", { headers: headers() });
    at("key-row").hidden = response.ok && !at("key").value;
    if (!response.ok) { throw new Error(await failure(response)); }
    showStats(await response.json());
    at("said").textContent = "";
  } catch (error) {
    at("said").textContent = error instanceof TypeError ? "The server does not answer." : error.message;
  }
}

function showStats(found) {
  stats = found;
  at("model").textContent = document.title = stats.model;
  at("budget").max = stats.max_budget;
  at("budget").placeholder = "default";
  for (const name of Object.keys(STANDARD)) { at(name).placeholder = standard(name); }
  at("limits").textContent = `Half of them heavy hitters, half the newest tokens; at most ${number(stats.max_budget)}.`
    + ` A conversation may have ${number(stats.max_prompt_tokens)} tokens.`;
  const facts = [
    ["Running sequences", `${stats.running} of ${stats.max_num_seqs}`],
    ["Waiting", number(stats.waiting)],
    ["Tokens per second", number(stats.tokens_per_second)],
    ["KV memory in use", stats.cache_bytes ? bytes(stats.cache_bytes) : "none"],
    ["Full caches would be", stats.full_bytes ? bytes(stats.full_bytes) : "none"],
    ["Tokens generated", number(stats.new_tokens)],
    ["Entries evicted", number(stats.evictions)],
  ];
  at("numbers").replaceChildren(...facts.flatMap(([name, value]) => [make("dt", name), make("dd", value)]));
}

const isTouch = () => matchMedia("(pointer: coarse)").matches;

function fit() {
  const box = at("prompt");
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight + 2}px`;
}

for (const name of SETTINGS) {
  at(name).value = settings[name];
  at(name).addEventListener("change", () => {
    settings[name] = at(name).validity.valid ? at(name).value : settings[name];
    at(name).value = settings[name];
    remember("h2okv-settings", settings);
    if (name === "system") { showAll(); }
  });
}
at("colours").checked = settings.colours;
at("colours").addEventListener("change", () => {
  settings.colours = at("colours").checked;
  remember("h2okv-settings", settings);
  showTools();
  paint();
});
// A key is forgotten with the tab.
at("key").value = sessionStorage.getItem("h2okv-key") || "";
at("key").addEventListener("change", () => {
  sessionStorage.setItem("h2okv-key", at("key").value);
  refresh();
});

at("starters").append(...STARTERS.map((text) => button(text, () => say(text))));
at("new").addEventListener("click", () => open(newChat()));
at("open-chats").addEventListener("click", () => { showChats(); at("chats").showModal(); });
at("open-settings").addEventListener("click", () => { refresh(); at("settings").showModal(); });
for (const drawer of document.querySelectorAll("dialog")) {
  // A click beside the drawer closes it, as the button does.
  drawer.addEventListener("click", (clicked) => {
    if (clicked.target === drawer || "close" in clicked.target.dataset) { drawer.close(); }
  });
}
at("stop").addEventListener("click", () => running?.stopper.abort());
at("form").addEventListener("submit", (submitted) => {
  submitted.preventDefault();
  say(at("prompt").value);
});
at("prompt").addEventListener("input", fit);
at("prompt").addEventListener("keydown", (pressed) => {
  if (pressed.key === "Enter" && !pressed.shiftKey && !pressed.isComposing && !isTouch()) {
    pressed.preventDefault();
    say(at("prompt").value);
  }
});
document.addEventListener("keydown", (pressed) => {
  if (pressed.key === "Escape" && !document.querySelector("dialog[open]")) { running?.stopper.abort(); }
});
setInterval(() => { if (at("settings").open) { refresh(); } }, 2000);
refresh().then(showAll);
at("prompt").focus();
