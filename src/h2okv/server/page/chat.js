// The conversation: what is written, asked of the server, shown and remembered.

const STARTERS = [
  "Explain how a rainbow forms, step by step.",
  "Write a short story about a lighthouse keeper and a fox.",
  "Give me a table of three planets with their size and number of moons.",
];
const SETTINGS = ["system", "temperature", "top_p", "max_tokens", "budget"];
// Where neither the user nor the model says anything; small models write nonsense at 1.
const STANDARD = { temperature: 0.6, top_p: 0.9, max_tokens: 512 };
const KEEP_EVERY = 500;  // milliseconds, while an answer comes

const store = new Store(), tab = nameTab(store);
const settings = { ...Object.fromEntries(SETTINGS.map((name) => [name, ""])), colours: true };
const systemPrompt = { role: "system", content: "" };
let chat = { id: "", turns: [] };
const blankDraft = () => ({ text: "", edits: "", before: "", file: null, fileBefore: null });
let draft = blankDraft();  // `edits` is the turn that is written anew, `file` a document's name and text
let stats = null;
let isLeft = false;  // the page is closed or reloaded
let running = null;  // the turn whose answer comes, and what stops it
let chosen = null;  // the answer whose cache is drawn

const turnKey = (id) => `${TURNS}${chat.id}/${id}`;
const draftKey = () => `${DRAFTS}${chat.id}/${tab}`;

// -- what is shown

/** The turns in view: without those that were asked again, and up to the one that is edited. */
function turnsInView() {
  return withoutReplaced(chat.turns, running?.turn).filter((one) => !draft.edits || one.id < draft.edits);
}

function messagesOf(turns) {
  systemPrompt.content = settings.system.trim();
  return [systemPrompt, ...turns.flatMap(({ question, answer }) => [question, answer])].filter((one) => one.role !== "system" || one.content);
}

function showAll() {
  const turns = turnsInView(), messages = messagesOf(turns);
  showMessages(messages);
  at("welcome").hidden = turns.length > 0;
  at("editing").hidden = !draft.edits;
  if (!messages.includes(chosen)) { chosen = messages.findLast((message) => caches.has(message)) || null; }
  showTools(turns);
  paint();
}

// -- what is asked

const apiKey = () => at("key").value.trim();

function standard(name) {
  if (name === "max_tokens") { return Math.min(STANDARD[name], stats?.max_new_tokens ?? Infinity); }
  return stats?.sampling?.[name] ?? STANDARD[name];
}

function request(messages) {
  const body = {
    model: stats.model, messages: messages.map(({ role, content }) => ({ role, content })), stream: true,
    stream_options: { include_usage: true },
  };
  for (const name of Object.keys(STANDARD)) { body[name] = Number(settings[name] || standard(name)); }
  const budget = Number(settings.budget), heavy = Math.floor(budget / 2);
  // A long conversation is told more rarely, or it would be more to send than the answer.
  const length = chosen ? caches.get(chosen).counts.length : 0;
  body.h2o = { kept_every: Math.max(4, Math.ceil(length / 500)) };
  if (budget) { body.h2o.cache = `${heavy}+${budget - heavy},sink=0`; }
  return body;
}

/** Asks a new question, or one again in place of a turn. */
async function ask({ content, file }, replaces = "") {
  const id = newId(chat.turns.at(-1)?.id), turn = { ...turnOf(turnKey(id), { question: content, file, replaces, end: "open" }), isStored: false };
  const { answer } = turn, before = turnsInView().filter((one) => one.answer.content && one.id !== replaces);
  const messages = messagesOf(before).concat(turn.question), kept = new Kept(), stopper = new AbortController();
  kept.messages = messages;
  running = { turn, stopper };
  chat.turns.push(turn);
  saveTurn(turn);
  tell("");
  at("talk").setAttribute("aria-busy", "true");
  showAll();
  bodies.get(answer).parentElement.setAttribute("aria-busy", "true");
  at("main").scrollTop = at("main").scrollHeight;
  showRunning();
  let frame = 0, pause = 0, usage = null, begin = 0, error = null;
  const draw = () => follow(() => {
    const start = performance.now();
    const seconds = (performance.now() - begin) / 1000, count = (usage?.completion_tokens || 0) - 1;
    const speed = count > 0 ? `${number(count / seconds)} tokens/s` : "";
    answer.note = [memoryLine(kept), speed].filter(Boolean).join(" · ");
    if (bodies.has(answer)) { showText(answer); }
    paint();
    // A long text takes a while to draw: most of the time is for the person and for what comes.
    pause = Math.min(3 * (performance.now() - start), 5000);
  });
  const drawSoon = () => {
    frame ||= setTimeout(() => requestAnimationFrame(() => {
      if (!frame) { return; }
      frame = 0;
      draw();
    }), pause < 50 ? 0 : pause);
  };
  const saving = setInterval(() => saveTurn(turn), KEEP_EVERY);
  try {
    const failure = stats ? null : await refresh();
    if (failure) { throw failure; }
    const post = () => reach("v1/chat/completions", apiKey(), {
      method: "POST", body: JSON.stringify(request(messages)), signal: stopper.signal,
      headers: { "Content-Type": "application/json" },
    });
    const response = await post().catch(async (one) => {
      // The server may have another model by now.
      if (one.status !== 404 || await refresh()) { throw one; }
      return post();
    });
    for await (const chunk of chunks(response)) {
      begin ||= performance.now();
      const choice = chunk.choices?.[0];
      answer.content += choice?.delta?.content || "";
      answer.end = choice?.finish_reason || answer.end;
      usage = chunk.usage || usage;
      if (choice?.h2o) {
        kept.take(choice.h2o);
        caches.set(answer, kept);
        chosen = answer;
      }
      drawSoon();
    }
    if (answer.end === "open") { answer.end = "stop"; }
    if (!answer.content) { throw new ServerError("The model's answer is empty.", 200); }
  } catch (caught) { error = caught; }
  clearInterval(saving);
  clearTimeout(frame);
  frame = 0;
  if (isLeft) { return; }  // it is the page that ended, and it has said so
  try { draw(); } finally { follow(() => finish(turn, error)); }
}

function finish(turn, error) {
  const { answer, replaces, key } = turn, isStop = error?.name === "AbortError", { isGone, next } = running;
  running = null;
  at("talk").setAttribute("aria-busy", "false");
  bodies.get(answer)?.parentElement.setAttribute("aria-busy", "false");
  at("status").textContent = isStop && !isGone ? "Stopped." : "";
  if (error) { Object.assign(answer, { end: isStop ? "stopped" : "cut", why: error.message }); }
  const isFree = !at("prompt").value && !draft.file && !draft.edits;
  if (isGone || (!answer.content && (replaces || isFree))) {
    // What was asked can be asked again, in other words; of two, the earlier answer is back.
    chat.turns = chat.turns.filter((one) => one !== turn);
    const isAgain = replaces || chat.turns.some((one) => one.replaces === turn.id);  // here or in another tab
    if (!isAgain && isFree) { write(textOf(turn.question), documentOf(turn.question)); }
    store.remove(key);
  } else {
    saveTurn(turn);
    if (replaces) {
      chat.turns = chat.turns.filter((one) => one.id !== replaces);
      store.remove(turnKey(replaces));
    }
  }
  if (error && !isStop) { tellError(error); }
  if (isGone && !chat.turns.length) { tell("This chat was deleted in another tab."); }
  showRunning();
  if (next) { open(next, "replaceState"); } else { showAll(); }
}

function showRunning() {
  at("go").hidden = Boolean(running);
  at("stop").hidden = !running;
  if (running) { at("status").textContent = "The answer is being written; Esc stops it."; }
  at("new").disabled = at("open-chats").disabled = at("full-chats").disabled = Boolean(running);
}

/** Asks what is in the box, or another question beside it. */
function say(text, isInBox = true) {
  const file = isInBox ? draft.file : null;
  if (running || !(text.trim() || file)) { return; }
  if (draft.edits && isInBox) { fork(); }
  else if (draft.edits) { open(newId()); }
  at("status").textContent = "";
  ask(withDocument(text.trim() || "Summarize this document.", file));
  if (isInBox) { write(""); }  // it is kept as a turn now
  if (!isTouch()) { at("prompt").focus(); }  // elsewhere it would bring the keyboard back
}

/** Begins a chat with the turns before the one that is edited; the chat as it was stays. */
function fork() {
  const turns = turnsInView();
  cancelEdit();
  chat = { id: newId(), turns: [] };
  draft = blankDraft();
  for (const turn of turns) {
    const id = newId(chat.turns.at(-1)?.id);
    chat.turns.push({ ...turn, id, key: turnKey(id), isStored: false, replaces: "" });
    saveTurn(chat.turns.at(-1));
  }
  showAddress("pushState");
}

function edit(turn) {
  const before = draft.edits ? draft.before : at("prompt").value;
  const fileBefore = draft.edits ? draft.fileBefore : draft.file;
  draft = { ...draft, edits: turn.id, before, fileBefore };
  write(textOf(turn.question), documentOf(turn.question));
  showAll();
  at("prompt").focus();
}

function cancelEdit() {
  const { before, fileBefore } = draft;
  draft = blankDraft();
  write(before, fileBefore);
}

function tryAgain(turn) {
  ask(turn.question, turn.id);
  at("stop").focus();
}

// -- what is remembered

function saveTurn(turn) {
  if (turn.isStored && !store.has(turn.key)) { sync(); return; }  // it was deleted in another tab
  // One that is asked again is kept already, with its earlier answer.
  if (turn.replaces && !turn.answer.content) { return; }
  const record = recordOf(turn);
  if (isLeft && record.end === "open") { record.end = "left"; }
  store.write(turn.key, record);
  turn.isStored = true;
}

/** Puts a text in the box, as if it were typed, and a document beside it. */
function write(text, file = null) {
  at("prompt").value = text;
  draft.file = file;
  showDocument();
  fit();
  saveDraft();
}

function saveDraft() {
  draft.text = at("prompt").value;
  if (draft.text || draft.edits || draft.file) { store.write(draftKey(), { ...draft, isLeft, time: Date.now() }); }
  else if (store.has(draftKey())) { store.remove(draftKey()); }
}

/** Takes this tab's draft of the chat, or else the newest of another; that tab still shows its own. */
function takeDraft() {
  const drafts = readDrafts(store, chat.id), mine = draftKey();
  const newest = drafts.find(({ key }) => key === mine) || drafts[0];
  const { text = "", edits = "", before = "", file, fileBefore } = newest || {};
  const documents = [file, fileBefore].map((one) => (isText(one?.name) && isText(one.text) ? one : null));
  draft = { text, edits, before, fileBefore: documents[1] };
  write(text, documents[0]);
  if (newest && newest.key !== mine) { store.remove(newest.key); }
}

const LARGEST = 4_000_000;  // characters of a document; a server reads fewer

function showDocument() {
  const { file } = draft;
  at("document").hidden = !file;
  at("document-name").textContent = file ? `${file.name}, ${number(file.text.length)} characters` : "";
  at("prompt").placeholder = file ? "Ask about the document" : "Write a message";
}

/** Takes a text document to the message that is written. */
async function takeDocument(file) {
  let text = null;
  try { text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer()).trim(); } catch { /* told below */ }
  if (text === null || text.includes("\0")) { tell(`${file.name} is not a text file in UTF-8.`); return; }
  if (!text || text.length > LARGEST) { tell(`${file.name} ${text ? "is too long" : "is empty"}.`); return; }
  draft.file = { name: file.name, text };
  tell("");
  showDocument();
  saveDraft();
  at("prompt").focus();
}

/** Brings in what other tabs have changed of this chat. */
function sync() {
  const isGone = (turn) => turn.isStored && !store.has(turn.key);
  const gone = chat.turns.filter(isGone);
  for (const [key, record] of readTurns(store, chat.id)) {
    const turn = chat.turns.find((one) => one.key === key);
    if (!turn) { chat.turns.push(turnOf(key, record)); }
    else if (turn !== running?.turn) { readInto(turn, record); }
  }
  if (gone.includes(running?.turn)) {
    running.isGone = true;
    running.stopper.abort();
  }
  chat.turns = chat.turns.filter((turn) => !gone.includes(turn) || turn === running?.turn);
  chat.turns.sort((one, other) => (one.id < other.id ? -1 : 1));
  if (gone.length) {
    if (!chat.turns.length) { tell("This chat was deleted in another tab."); }
    saveDraft();  // which was not meant
  }
  follow(showAll);
}

function open(id, how = "pushState") {
  if (chat.id) { saveDraft(); }
  chat = { id, turns: [] };
  takeDraft();
  tell("");
  at("status").textContent = "";
  showAddress(how);
  sync();
  at("main").scrollTop = at("main").scrollHeight;
  at("prompt").focus();
}

/** Puts the chat into the page's address, so that a reload and Back show it. */
function showAddress(how) {
  const address = `#chat-${chat.id}`;
  if (location.hash !== address) { history[how](null, "", address); }
}

const addressed = () => /^#chat-([0-9a-z]+)$/.exec(location.hash)?.[1];

/** What was left in the box when a page was closed without having been asked. */
function leftDraft() {
  const [newest] = readDrafts(store).filter(({ key, isLeft }) => {
    const [id, page] = key.slice(DRAFTS.length).split("/");
    return page === tab || (isLeft && !store.keys(`${TURNS}${id}/`).length);
  });
  return newest?.key.slice(DRAFTS.length).split("/")[0];
}

function deleteChat(one) {
  let unsent = "";
  if (one.id === chat.id) {
    // What is written to go on with is another thing than what was said.
    if (chat.turns.length) { unsent = draft.edits ? draft.before : at("prompt").value; }
    at("prompt").value = "";
    draft = blankDraft();
    chat.turns = [];
  }
  store.remove(...one.keys);
  if (one.id === chat.id) {
    open(newId());
    write(unsent);
  }
  showChats(listChats(store));
}

function showUnkept() {
  at("full").hidden = !store.unkept.size;
  const isFull = /quota/i.test(store.reason);
  at("full-why").textContent = isFull
    ? "This browser's storage for this page is full: what is new is lost when this tab is closed. Download the chat, or delete old ones."
    : "This browser keeps nothing for this page: chats are lost when this tab is closed. Download them to keep them.";
  at("full-chats").hidden = !isFull;
}

function chatInView() { return { turns: withoutReplaced(chat.turns), draft: at("prompt").value }; }

/** Keeps all that is not kept yet, for the page may be ended without another word. */
function leave() {
  saveDraft();
  if (running) { saveTurn(running.turn); }
}

// -- settings

/** Asks the server for its numbers; where it can not be had, says why. */
async function refresh() {
  // A proxy may serve the page at an address without the slash that the other addresses need.
  const below = location.pathname.endsWith("/") || stats ? [] : [`${location.pathname}/`];
  let failure = null;
  for (const path of [...below, ""]) {
    try {
      showStats(await readStats(path, apiKey()));
      if (path) { history.replaceState(null, "", path + location.search + location.hash); }
      at("key-form").hidden = true;
      if (at("said").classList.contains("lasting")) { tell(""); }
      return null;
    } catch (error) {
      failure ??= error;
      if (error.status !== 404) { break; }  // no other address would help, nor may see the key
    }
  }
  failure.isLasting = true;
  tellError(failure);
  return failure;
}

function showStats(numbers) {
  stats = numbers;
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
  if (stats.agreement?.total) { facts.push(["Next tokens as with a full cache", stats.agreement.text]); }
  at("numbers").replaceChildren(...facts.flatMap(([name, value]) => [make("dt", name), make("dd", value)]));
}

function readSettings() {
  for (const name of [...SETTINGS, "colours"]) {
    const value = store.read(CHOICES + name), otherwise = name === "colours" ? true : "";
    settings[name] = typeof value === typeof otherwise ? value : otherwise;
    if (name === "colours") { at(name).checked = settings[name]; }
    else if (document.activeElement !== at(name)) { at(name).value = settings[name]; }
  }
}

function choose(name, value) {
  settings[name] = value;
  store.write(CHOICES + name, value);
  if (["system", "colours"].includes(name)) { showAll(); }
}

const isTouch = () => matchMedia("(pointer: coarse)").matches;

function fit() {
  const box = at("prompt");
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight + 2}px`;
}

// -- what happens

for (const name of SETTINGS) {
  const field = at(name), take = () => { if (field.validity.valid) { choose(name, field.value); } };
  field.addEventListener("input", take);
  field.addEventListener("change", () => {
    take();
    field.value = settings[name];
  });
}
at("colours").addEventListener("change", () => choose("colours", at("colours").checked));
// A key is forgotten with the tab.
at("key").value = store.session("h2okv-key") || "";
at("key").addEventListener("change", () => {
  store.session("h2okv-key", at("key").value);
  refresh();
});
at("key-form").addEventListener("submit", (submitted) => {
  submitted.preventDefault();
  at("prompt").focus();  // the field's change is what counts
});

at("starters").append(...STARTERS.map((text) => button(text, () => say(text, false))));
at("new").addEventListener("click", () => { if (chat.turns.length || draft.edits) { open(newId()); } else { at("prompt").focus(); } });
for (const id of ["open-chats", "full-chats"]) {
  at(id).addEventListener("click", () => { showChats(listChats(store)); at("chats").showModal(); });
}
at("full-download").addEventListener("click", () => download([chatInView()], "chat"));
at("download-all").addEventListener("click", () => download(listChats(store), "chats"));
at("cancel-edit").addEventListener("click", () => { cancelEdit(); showAll(); at("prompt").focus(); });
at("open-settings").addEventListener("click", () => { refresh(); at("settings").showModal(); });
for (const drawer of document.querySelectorAll("dialog")) {
  // A click beside the drawer closes it, as the button does.
  drawer.addEventListener("click", (clicked) => {
    if (clicked.target === drawer || "close" in clicked.target.dataset) { drawer.close(); }
  });
}
at("add").addEventListener("click", () => at("file").click());
at("file").addEventListener("change", () => {
  if (at("file").files.length) { takeDocument(at("file").files[0]); }
  at("file").value = "";
});
at("remove-document").addEventListener("click", () => { write(at("prompt").value); at("prompt").focus(); });
for (const name of ["dragover", "dragleave", "drop"]) {
  addEventListener(name, (dragged) => {
    if (!dragged.dataTransfer?.types.includes("Files")) { return; }
    dragged.preventDefault();
    document.body.classList.toggle("dropping", name === "dragover");
    if (name === "drop" && dragged.dataTransfer.files.length) { takeDocument(dragged.dataTransfer.files[0]); }
  });
}
at("skip").addEventListener("click", (clicked) => { clicked.preventDefault(); at("prompt").focus(); });
at("stop").addEventListener("click", () => running?.stopper.abort());
at("form").addEventListener("submit", (submitted) => {
  submitted.preventDefault();
  say(at("prompt").value);
});
at("prompt").addEventListener("input", () => { fit(); saveDraft(); });
at("prompt").addEventListener("keydown", (pressed) => {
  if (pressed.key === "Enter" && !pressed.shiftKey && !pressed.isComposing && !isTouch()) {
    pressed.preventDefault();
    say(at("prompt").value);
  }
});
document.addEventListener("keydown", (pressed) => {
  if (pressed.key === "Escape" && !document.querySelector("dialog[open]")) { running?.stopper.abort(); }
});
addEventListener("storage", ({ key, newValue }) => {
  if (key !== null && key === running?.turn.key && newValue === null) { store.remove(key); }  // as meant there
  if (key === null || key.startsWith(CHOICES)) { readSettings(); }
  if (key === null || [CHOICES, turnKey("")].some((prefix) => key.startsWith(prefix))) { sync(); }
  if (newValue === null) { store.retry(); }
  if (at("chats").open) { showChats(listChats(store)); }
});
addEventListener("popstate", () => {
  const id = addressed();
  if (!id || id === chat.id) { return; }
  if (running) {
    running.next = id;
    running.stopper.abort();
  } else { open(id, "replaceState"); }
});
document.addEventListener("visibilitychange", () => { if (document.hidden) { leave(); } else { sync(); } });
addEventListener("pagehide", () => {
  isLeft = true;
  leave();
  store.session(TAB, tab);
});
addEventListener("pageshow", ({ persisted }) => {
  if (!persisted) { return; }
  if (running) { location.reload(); }
  isLeft = false;
  store.session(TAB, null);
  saveDraft();
  sync();
});
setInterval(() => {
  if (!document.hidden && (at("settings").open || (at("said").classList.contains("lasting") && at("key-form").hidden))) { refresh(); }
}, 2000);
store.onchange = showUnkept;
migrate(store);
readSettings();
open(addressed() || leftDraft() || newId(), "replaceState");
showUnkept();
refresh().then(showAll);
