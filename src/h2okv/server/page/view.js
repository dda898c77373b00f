// What is shown: the turns of a chat, their tools, and what the cache holds drawn over them.

const at = (id) => document.getElementById(id);
const number = (n) => n.toLocaleString("en", { maximumFractionDigits: 1 });
const bytes = (n) => n < 2 ** 20 ? `${number(n / 1024)} KiB` : `${number(n / 2 ** 20)} MiB`;
const bodies = new Map();  // where each message's text is shown
const caches = new WeakMap();  // what the cache held at the end of each answer
const ENDS = {
  length: () => "Ended by Max tokens.",
  stopped: () => "Stopped.",
  cut: ({ content, why }) => `${content ? "Cut short." : "No answer."} ${why}`,
  left: () => "Cut short. The page was closed while this was written.",
  open: () => "Being written in another tab, or cut short there.",
};

function button(text, pressed) {
  const element = make("button", text);
  element.type = "button";
  element.addEventListener("click", pressed);
  return element;
}

function article(message) {
  const body = make("div"), note = make("p"), tools = make("div");
  [body.className, note.className, tools.className] = ["said", "note", "tools"];
  const element = make("article", make("h3"), body, note, tools);
  element.className = message.role;
  bodies.set(message, body);
  return element;
}

/** Shows a message's text; where it cannot be drawn, as it was written. No message keeps others from being shown. */
function showText(message) {
  try { drawText(message); } catch (error) {
    console.warn(error);
    const body = bodies.get(message), plain = make("p", textNode(message.content, 0));
    body.source = message.content;
    plain.className = "plain";
    body.replaceChildren(plain);
  }
}

function drawText(message) {
  const body = bodies.get(message), who = { user: "You", assistant: stats?.model || "Model", system: "System prompt" };
  body.previousSibling.textContent = who[message.role];
  if (body.source === message.content) { /* it is shown */ }
  else if (message.role === "assistant") {
    renderMarkdown(body, message.content);
    body.source = message.content;
    for (const code of body.querySelectorAll("pre > code:only-child")) {
      const copying = button("", () => copy(code.textContent));
      copying.setAttribute("aria-label", "Copy the code");
      code.before(copying);
    }
  }
  else {
    body.source = message.content;
    const from = message.file?.length || 0, lead = from && message.content.length - message.content.slice(from).trimStart().length;
    body.replaceChildren(textNode(message.content, lead));
    if (from) {
      const details = make("details", make("summary"), make("div", textNode(message.content.slice(0, from), 0)));
      details.className = "document";
      body.prepend(details);
    }
  }
  if (message.file) { showHeld(message, null); }
  const isRunning = message === running?.turn.answer, end = !isRunning && ENDS[message.end]?.(message);
  const note = body.nextSibling, content = [message.note || ""];
  if (end) { content.unshift(make("b", end), message.note ? " · " : ""); }
  note.replaceChildren(...content);
  note.hidden = !note.textContent;
  note.classList.toggle("cut", ["cut", "left"].includes(message.end) && !isRunning);
}

function textNode(text, from) {
  const node = document.createTextNode(text.slice(from));
  node.at = from;
  return node;
}

/** Says of a document how much of it the cache holds, where that is known. */
function showHeld(message, kept, start = 0) {
  const { file } = message, held = kept?.fraction(start, start + file.length);
  const words = held === undefined ? "" : held === 1 ? " · the cache holds all of it; under Settings it can keep less"
    : ` · the cache holds ${number(100 * held)} % of it`;
  bodies.get(message)?.querySelector("summary").replaceChildren(make("b", file.name), ` · ${number(file.length)} characters${words}`);
}

/** Shows messages in their order; the elements of those that were shown already stay. */
function showMessages(messages) {
  const elements = messages.map((message) => bodies.get(message)?.parentElement || article(message));
  for (const message of [...bodies.keys()].filter((one) => !messages.includes(one))) { bodies.delete(message); }
  const talk = at("talk");
  if (elements.length !== talk.children.length || elements.some((one, k) => one !== talk.children[k])) {
    talk.replaceChildren(...elements);
  }
  messages.forEach(showText);
}

function showTools(turns) {
  const tools = (message, ...buttons) => {
    bodies.get(message)?.parentElement.querySelector(".tools").replaceChildren(...buttons.filter(Boolean));
  };
  for (const turn of turns) {
    const { question, answer } = turn, hasColours = caches.has(answer) && settings.colours;
    if (running) {
      tools(question);
      tools(answer);
      continue;
    }
    const choose = hasColours && button("Colours of this answer", () => { chosen = answer; showTools(turns); paint(); });
    if (choose) { choose.setAttribute("aria-pressed", answer === chosen); }
    tools(question, button("Edit", () => edit(turn)));
    tools(answer, answer.content && button("Copy", () => copy(answer.content)),
      turn === turns.at(-1) && !draft.edits && button("Try again", () => tryAgain(turn)), choose);
  }
}

function memoryLine(kept) {
  if (!kept?.numHeads) { return ""; }
  const memory = `KV memory ${bytes(kept.bytes)}`;
  return kept.isWhole ? `${memory}, nothing evicted yet` : `${memory}, a full cache would be ${bytes(kept.fullBytes)}`;
}

/** Draws what the chosen answer's cache holds, and says it in numbers. */
function paint() {
  try { paintChosen(); } catch (error) { console.warn(error); }  // the text stays without colours
}

function paintChosen() {
  const kept = settings.colours && chosen ? caches.get(chosen) : null;
  at("legend").hidden = !kept?.numHeads;
  if (!kept?.numHeads) { paintKept(null, [], bodies); return; }
  const starts = kept.starts(kept.messages, chosen);
  paintKept(kept, starts, bodies);
  for (const [message, start] of starts) { if (message.file) { showHeld(message, kept, start); } }
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

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    at("status").textContent = "Copied.";
  } catch { tell("The browser does not let this page copy; select the text."); }
}

/** Says what is wrong; what concerns the server stays until it is well again. */
function tell(words, isLasting = false) {
  at("said").textContent = words;
  at("said").classList.toggle("lasting", Boolean(words) && isLasting);
}

function tellError(error) {
  if (error.status === 401) {
    at("key-form").hidden = false;
    if (!at("prompt").value) { at("key").focus(); }
  }
  tell(error.message, Boolean(error.isLasting));
}

// -- the list of chats

function titleOf({ turns, draft }) {
  const first = turns[0]?.question, name = first?.file ? `${first.file.name}: ` : "";
  return (name + (first ? textOf(first) : draft)).trim().slice(0, 60);
}

function factsOf({ turns, draft, newest, size }) {
  const when = new Date(parseInt(newest.slice(0, 9), 36));
  const facts = [when.toLocaleString([], { dateStyle: "medium", timeStyle: "short" }), bytes(size)];
  if (draft) { facts.push(turns.length ? "with a draft" : "not sent"); }
  return facts.join(" · ");
}

function showChats(chats) {
  at("list").replaceChildren(...chats.map((one) => {
    const title = button(titleOf(one), () => { at("chats").close(); open(one.id); });
    title.setAttribute("aria-current", one.id === chat.id);
    const remove = button("Delete", () => deleteChat(one));
    remove.setAttribute("aria-label", `Delete: ${title.textContent}`);
    const facts = make("small", factsOf(one));
    return make("li", title, remove, facts);
  }));
  at("download-all").hidden = !chats.length;
}

/** Puts chats into a file of Markdown, where the browser puts its downloads. */
function download(chats, name) {
  const part = (who, text) => (text ? [`## ${who}\n\n${text}\n`] : []);
  const texts = chats.map((one) => [
    `# ${titleOf(one).replaceAll("\n", " ")}\n`,
    ...part("System prompt", settings.system.trim()),
    ...one.turns.flatMap(({ question, answer }) => [
      ...part("You", question.content), ...part(stats?.model || "Model", answer.content),
    ]),
    ...part("Not sent", one.draft),
  ].join("\n"));
  const link = make("a");
  link.href = URL.createObjectURL(new Blob([texts.join("\n")], { type: "text/markdown" }));
  link.download = `${name}.md`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}
