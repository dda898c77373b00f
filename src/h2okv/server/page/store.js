// What this browser remembers. Each turn of a chat, each draft and each setting is a record of its own, and no two
// tabs write the same turn or draft: so tabs cannot overwrite each other, and merging is reading.

const TURNS = "h2okv/turn/", DRAFTS = "h2okv/draft/", CHOICES = "h2okv/setting/", TAB = "h2okv/tab";

/** Records in localStorage. What it has no room for stays in `unkept`, survives a reload, and is tried again. */
class Store {
  unkept = new Map();
  /** Why the last record was not kept. */
  reason = "";
  onchange = () => { /* set by who shows it */ };

  constructor() {
    for (const key of this.#of("sessionStorage", (area) => Object.keys(area)) || []) {
      if ([TURNS, DRAFTS, CHOICES].some((prefix) => key.startsWith(prefix))) {
        this.unkept.set(key, sessionStorage.getItem(key));
      }
    }
    this.retry();
  }

  /** Does something with an area; null where the browser refuses. */
  #of(name, use) {
    try { return use(window[name]); } catch (error) {
      this.reason = error.name;
      return null;
    }
  }

  #put(key, text) {
    if (this.#of("localStorage", (area) => { area.setItem(key, text); return true; })) {
      if (this.unkept.delete(key)) { this.session(key, null); }
    } else {
      this.unkept.set(key, text);
      this.session(key, text);
    }
  }

  /** Reads what this tab alone has; with a text, or null, sets it. */
  session(key, text) {
    return this.#of("sessionStorage", (area) => {
      if (text === undefined) { return area.getItem(key); }
      return text === null ? area.removeItem(key) : area.setItem(key, text);
    });
  }

  #text(key) { return this.unkept.get(key) ?? this.#of("localStorage", (area) => area.getItem(key)); }

  has(key) { return this.#text(key) !== null; }

  size(key) { return key.length + (this.#text(key)?.length || 0); }

  /** Reads a record; null where there is none, or none that can be read. */
  read(key) { try { return JSON.parse(this.#text(key)); } catch { return null; } }

  write(key, record) {
    this.#put(key, JSON.stringify(record));
    this.onchange();
  }

  remove(...keys) {
    for (const key of keys) {
      this.#of("localStorage", (area) => area.removeItem(key));
      if (this.unkept.delete(key)) { this.session(key, null); }
    }
    this.retry();
  }

  /** Keeps what there was no room for, now that there may be. */
  retry() {
    for (const [key, text] of [...this.unkept]) { this.#put(key, text); }
    this.onchange();
  }

  /** The keys that begin with a prefix, sorted. */
  keys(prefix) {
    const keys = this.#of("localStorage", (area) => Object.keys(area)) || [];
    return [...new Set([...keys, ...this.unkept.keys()])].filter((key) => key.startsWith(prefix)).sort();
  }
}

/** Makes a name that sorts by time, after `earlier` whatever the clock says. */
function newId(earlier = "") {
  const time = Math.max(Date.now(), parseInt(earlier.slice(0, 9), 36) + 1 || 0);
  const [random] = crypto.getRandomValues(new Uint32Array(1));
  return time.toString(36).padStart(9, "0") + random.toString(36).padStart(7, "0");
}

const isText = (value) => typeof value === "string";
const NAMES = /^h2okv\/\w+\/\w+\/\w+$/;  // of turns and drafts: the chat's, then the turn's or the tab's
const lastPart = (key) => key.slice(key.lastIndexOf("/") + 1);

/** A document is the beginning of a question: its name, and its length there. */
const isFile = (file, question) => isText(file?.name) && file.length > 0 && file.length < question.length;
const textOf = ({ content, file }) => (file ? content.slice(file.length).trim() : content);
const documentOf = ({ content, file }) => file && { name: file.name, text: content.slice(0, file.length) };
const withDocument = (text, file) => (file ? { content: `${file.text}\n\n${text}`, file: { name: file.name, length: file.text.length } } : { content: text, file: null });

/** Makes the turn of a record: its two messages, and how the answer ended. */
function turnOf(key, record) {
  const turn = { key, id: lastPart(key), question: { role: "user" }, answer: { role: "assistant" } };
  return readInto(turn, record);
}

function readInto(turn, { question, answer, note = "", end = "stop", why = "", replaces = "", file = null }) {
  Object.assign(turn.question, { content: question, file: isFile(file, question) ? file : null });
  Object.assign(turn.answer, { content: answer ?? "", note, end, why });
  return Object.assign(turn, { replaces, isStored: true });
}

function recordOf({ question, answer: { content, note, end, why }, replaces }) {
  return { question: question.content, file: question.file, answer: content, note, end, why, replaces };
}

/** Reads the turns of a chat, or of all, as keys and records in order; one of another form is left alone. */
function readTurns(store, chat) {
  const keys = store.keys(chat ? `${TURNS}${chat}/` : TURNS).filter((key) => NAMES.test(key));
  return keys.map((key) => [key, store.read(key)]).filter(([, one]) => isText(one?.question) && isText(one.answer ?? ""));
}

/** A turn that was asked again, and has an answer, takes the earlier one's place. */
function withoutReplaced(turns, running) {
  const replaced = new Set(turns.filter((one) => one.answer.content || one === running).map((one) => one.replaces));
  return turns.filter((one) => !replaced.has(one.id));
}

/** Reads the drafts of a chat, or of all, as keys and records, newest first. */
function readDrafts(store, chat) {
  const keys = store.keys(chat ? `${DRAFTS}${chat}/` : DRAFTS).filter((key) => NAMES.test(key));
  return keys.map((key) => ({ key, ...store.read(key) })).filter((one) => isText(one.text)).sort((one, other) => (other.time || 0) - (one.time || 0));
}

/** Lists the chats, the newest first: their turns, what is written but not sent, their size in characters. */
function listChats(store) {
  const chats = new Map();
  const entry = (key, prefix) => {
    const id = key.slice(prefix.length).split("/")[0];
    if (!chats.has(id)) { chats.set(id, { id, keys: [], turns: [], draft: "", newest: id }); }
    chats.get(id).keys.push(key);
    return chats.get(id);
  };
  for (const [key, record] of readTurns(store)) {
    const chat = entry(key, TURNS);
    chat.turns.push(turnOf(key, record));
    chat.newest = lastPart(key);
  }
  for (const { key, text } of readDrafts(store)) { entry(key, DRAFTS).draft ||= text; }
  for (const chat of chats.values()) {
    chat.turns = withoutReplaced(chat.turns);
    chat.size = chat.keys.reduce((sum, key) => sum + store.size(key), 0);
  }
  return [...chats.values()].sort((one, other) => (one.newest < other.newest ? 1 : -1));
}

/** Names the page in this tab; a reload keeps the name, and a copy of the tab gets another. */
function nameTab(store) {
  // A copied tab begins with what the first one has here, which is nothing while its page runs.
  const name = store.session(TAB) || newId();
  store.session(TAB, null);
  return name;
}

/** Takes over what an earlier page kept: one list of all chats, one record of all settings. */
function migrate(store) {
  const settings = store.read("h2okv-settings") || {};
  for (const [name, value] of Object.entries(settings)) {
    if (!store.has(CHOICES + name)) { store.write(CHOICES + name, value); }
  }
  store.remove("h2okv-settings");
  const chats = store.read("h2okv-chats");
  while (Array.isArray(chats) && chats.length && !store.unkept.size) {
    const { id, messages } = chats.at(-1) || {}, named = (time) => `${Number(time || 0).toString(36).padStart(9, "0")}0000000`;
    let key = "";
    for (const [index, { role, content }] of (messages || []).entries()) {
      if (!isText(content)) { continue; }
      if (role === "user") {
        key = `${TURNS}${named(id)}/${named(id + index)}`;
        store.write(key, { question: content });
      } else if (key) { store.write(key, { ...store.read(key), answer: content }); }
    }
    // One at a time, for there may be no room for all of them twice.
    if (!store.unkept.size) { chats.pop(); }
    store.write("h2okv-chats", chats);
  }
  if (!chats?.length) { store.remove("h2okv-chats"); }
}
