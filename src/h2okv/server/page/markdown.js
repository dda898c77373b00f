// Markdown to elements. Nothing is ever read as HTML, and each text node knows in `at` where its
// text begins in the source, so that tokens can be found in what is shown.

// Each piece of text is read in time that grows with its length, whatever a model writes: what opens is
// a sticky pattern, and what closes is searched once. A pattern that looked ahead would look again from each mark.
const OPENERS = /[\\`*_~![\nh]/g;
const ESCAPE = /\\[!-/:-@[-`{-~]/y;
const TICKS = /`+/g;
// An element's name, what opens it, and what closes it: the first such mark, or for `em` nothing but the next mark.
const PAIRS = [
  ["strong", /\*\*(?=\S)/y, /(?<=\S)\*\*(?!\*)/g],
  ["strong", /(?<!\w)__(?=\S)/y, /(?<=\S)__(?!\w)/g],
  ["em", /\*(?=[^\s*])/y, /(?<=[^\s*])\*(?!\*)/y],
  ["em", /(?<!\w)_(?=[^\s_])/y, /(?<=[^\s_])_(?!\w)/y],
  ["del", /~~(?=\S)/y, /(?<=\S)~~/g],
];
const LINK = /!?\[/y;
const LONGEST_LINK = 1000;  // characters of its text
const TARGET = /\(([^()\s]{0,2000}(?:\([^()\s]{0,2000}\)[^()\s]{0,2000}){0,20})\)/y;
const BARE_URL = /https?:\/\/[^\s<>()]*[^\s<>().,;:!?'"*]/y;
const FENCE = /^ {0,3}(`{3,}(?!`)|~{3,}(?!~))([^`]*)$/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])( {1,4}|\t|$)/;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const HEADING = /^ {0,3}(#{1,6})( +|$)/;
const QUOTE = /^ {0,3}> ?/;
const TABLE_RULE = /^\|?( *:?-+:? *\|)+( *:?-+:?)?$/;
const STARTS = [FENCE, ITEM, RULE, HEADING, QUOTE];
// What is nested deeper is shown as it is written: no person nests so deep, and a screen has no room for it.
const DEEPEST = 8;
const LONGEST_CODE = 50_000;  // characters in colours
const MOST_COLUMNS = 200;
const MOST_NODES = 50_000;  // elements and texts of a message; a browser takes minutes for a million

let room = Infinity;  // nodes that the message that is drawn may still have

function takeRoom() {
  room -= 1;
  if (room < 0) { throw new RangeError(`the message has more than ${MOST_NODES} parts`); }
}

function make(name, ...children) {
  takeRoom();
  return fill(document.createElement(name), children);
}

/** Appends elements, however many: a call cannot have a hundred thousand arguments. */
function fill(element, children) {
  for (const child of children) { element.append(child); }
  return element;
}

/** Puts source[from..to) of joined lines into an element; `at` has each character's place. */
function leaf(parent, { text, at }, from, to) {
  while (from < to) {
    let end = from + 1;
    while (end < to && at[end] === at[end - 1] + 1) { end += 1; }
    takeRoom();
    const node = document.createTextNode(text.slice(from, end));
    node.at = at[from];
    parent.append(node);
    from = end;
  }
}

/** Puts text with emphasis, code and links into an element. */
function inline(parent, all, from, to, depth = 0) {
  const part = { text: all.text.slice(0, to), at: all.at }, { text } = part;
  const missing = new Set(), runs = ticks(text, from);
  let plain = from, here = depth < DEEPEST ? from : to;
  for (;;) {
    OPENERS.lastIndex = here;
    const next = here < to && OPENERS.exec(text);
    if (!next) { break; }
    here = next.index;
    const [start, end, after, name, url] = span(text, here, missing, runs);
    if (!name) { here = after; continue; }
    leaf(parent, part, plain, here);
    if (name === "escape") { leaf(parent, part, start, end); }
    else if (name === "a") { link(parent, part, start, end, url ?? text.slice(start, end)); }
    else {
      const element = make(name);
      if (name === "code") { leaf(element, part, start, end); }
      else { inline(element, part, start, end, depth + 1); }
      parent.append(element);
    }
    here = plain = after;
  }
  leaf(parent, part, plain, to);
}

/** Finds where each length of a run of backticks stands, from last to first. */
function ticks(text, from) {
  const runs = new Map();
  TICKS.lastIndex = from;
  for (let found = TICKS.exec(text); found; found = TICKS.exec(text)) {
    if (!runs.has(found[0].length)) { runs.set(found[0].length, []); }
    runs.get(found[0].length).push(found.index);
  }
  for (const places of runs.values()) { places.reverse(); }
  return runs;
}

/** Reads what a mark opens: where its text begins and ends, what is behind it, its element's name, its address. */
function span(text, here, missing, runs) {
  const mark = text[here], nothing = [here, here, here + 1, ""];
  const opens = (pattern) => { pattern.lastIndex = here; return pattern.exec(text)?.[0]; };
  if (mark === "\n") { return [here, here, here + 1, "br"]; }
  if (mark === "\\") { return opens(ESCAPE) ? [here + 1, here + 2, here + 2, "escape"] : nothing; }
  if (mark === "h") {
    const url = opens(BARE_URL);
    return url ? [here, here + url.length, here + url.length, "a"] : nothing;
  }
  if (mark === "`") {
    TICKS.lastIndex = here;
    const { length } = TICKS.exec(text)[0], places = runs.get(length) || [];
    while (places.at(-1) <= here) { places.pop(); }
    return places.length ? [here + length, places.at(-1), places.at(-1) + length, "code"] : [here, here, here + length, ""];
  }
  if (mark === "!" || mark === "[") {
    const open = opens(LINK);
    return open && linkSpan(text, here + open.length) || nothing;
  }
  for (const [name, opener, closer] of PAIRS) {
    const open = missing.has(closer) ? null : opens(opener);
    if (!open) { continue; }
    const start = here + open.length, next = closer.sticky ? text.indexOf(mark, start) : start + 1;
    closer.lastIndex = next;
    const found = next > start && closer.exec(text);
    if (found) { return [start, found.index, found.index + found[0].length, name]; }
    if (next < 0 || !closer.sticky) { missing.add(closer); }  // none for a later one either
  }
  return nothing;
}

function linkSpan(text, start) {
  const length = text.slice(start, start + LONGEST_LINK).search(/[\]\n]/), end = start + length;
  if (length < 1 || text[end] !== "]" || text[end + 1] !== "(") { return null; }
  TARGET.lastIndex = end + 1;
  const found = TARGET.exec(text);
  return found && [start, end, end + 1 + found[0].length, "a", found[1]];
}

function link(parent, part, start, end, url) {
  const element = make("a");
  leaf(element, part, start, end);
  // No other scheme can do harm, or anything at all.
  if (/^(https?:\/\/|mailto:)/i.test(url)) {
    Object.assign(element, { href: url, target: "_blank", rel: "noopener noreferrer" });
  }
  parent.append(element);
}

/** Lines as one text, and where each of its characters is in the source. */
function joined(lines) {
  const at = [];
  for (const line of lines) {
    for (let k = 0; k <= line.text.length; k += 1) { at.push(line.at + k); }
  }
  return { text: lines.map((line) => line.text).join("\n"), at };
}

const cut = (line, length) => ({ text: line.text.slice(length), at: line.at + length });

function paragraph(name, lines) {
  const element = make(name), all = joined(lines.map((line) => {
    const lead = line.text.length - line.text.trimStart().length;
    return { ...cut(line, lead), text: line.text.trim() };
  }));
  inline(element, all, 0, all.text.length);
  return element;
}

function cells(name, line) {
  const row = make("tr"), text = line.text.trimEnd();
  const lead = text.length - text.trimStart().length, end = text.endsWith("|") ? text.length - 1 : text.length;
  let start = text[lead] === "|" ? lead + 1 : 0;
  for (let here = start; here <= end; here += 1) {
    if (text[here] === "\\" && text[here + 1] === "|" && here + 1 < end) { here += 1; }
    else if (here === end || (text[here] === "|" && row.cells.length < MOST_COLUMNS)) {
      row.append(paragraph(name, [{ text: text.slice(start, here), at: line.at + start }]));
      start = here + 1;
    }
  }
  return row;
}

const KEYWORDS = "and|as|assert|async|await|break|case|catch|class|const|continue|def|del|do|done|elif|else|enum|esac|except"
  + "|export|extends|false|False|fi|finally|fn|for|from|func|function|if|impl|import|in|interface|is|lambda|let|loop|match"
  + "|mod|mut|new|nil|None|not|null|or|package|pass|private|public|pub|raise|return|self|static|struct|super|switch|then"
  + "|this|throw|trait|true|True|try|type|use|var|void|where|while|with|yield"
  + "|SELECT|FROM|WHERE|JOIN|GROUP|ORDER|BY|INSERT|UPDATE|CREATE|TABLE|VALUES|AND|OR|NOT|NULL|AS|ON";
const COMMENTS = [[/^(py|sh|ba|z|shell|rb|ruby|r$|perl|y|toml|make|docker)/, "#"], [/^(sql|lua|haskell)/, "--"]];

/** Puts code into an element, its words in colours where its language is named. */
function highlight(parent, all, language) {
  const mark = COMMENTS.find(([names]) => names.test(language))?.[1] || "//";
  const pattern = new RegExp(`(?<comment>${mark}.*|/\\*[^]*?(?:\\*/|$))`
    + `|(?<string>"""[^]*?(?:"""|$)|(?<quote>["'\`])(?:\\\\.|(?!\\k<quote>)[^\\\\\n])*\\k<quote>?)`
    + `|(?<number>\\b\\d[\\w.]*)|(?<keyword>\\b(?:${KEYWORDS})\\b)`, "g");
  let here = 0;
  const isColoured = language && language !== "text" && all.text.length <= LONGEST_CODE;
  for (const found of isColoured ? all.text.matchAll(pattern) : []) {
    const end = found.index + found[0].length, word = make("span");
    word.className = ["comment", "string", "number", "keyword"].find((name) => found.groups[name] !== undefined);
    leaf(parent, all, here, found.index);
    leaf(word, all, found.index, end);
    parent.append(word);
    here = end;
  }
  leaf(parent, all, here, all.text.length);
}

/** Takes the block that begins with the line at `from`; tells where the next one begins. */
function block(lines, from, depth) {
  const first = lines[from], fence = FENCE.exec(first.text), heading = HEADING.exec(first.text);
  const until = (isAfter) => {
    let end = from + 1;
    while (end < lines.length && !isAfter(lines[end].text)) { end += 1; }
    return end;
  };
  if (fence) {
    const end = until((text) => text.trim().startsWith(fence[1]));
    const code = make("code"), all = joined(lines.slice(from + 1, end));
    highlight(code, all, /^[\w+#.-]*/.exec(fence[2].trim())[0].toLowerCase());
    return [make("pre", code), end + 1];
  }
  if (RULE.test(first.text)) { return [make("hr"), from + 1]; }
  if (heading) {
    const text = first.text.slice(heading[0].length).trimEnd();
    let end = text.length;
    while (text[end - 1] === "#") { end -= 1; }
    if (end && text[end - 1] !== " ") { end = text.length; }
    // The page has headings of its own above these.
    const level = Math.min(heading[1].length + 3, 6);
    return [paragraph(`h${level}`, [{ text: text.slice(0, end), at: first.at + heading[0].length }]), from + 1];
  }
  if (QUOTE.test(first.text) && depth < DEEPEST) {
    const end = until((text) => !QUOTE.test(text));
    const inner = lines.slice(from, end).map((line) => cut(line, QUOTE.exec(line.text)[0].length));
    return [fill(make("blockquote"), blocks(inner, depth + 1)), end];
  }
  if (ITEM.test(first.text) && depth < DEEPEST) { return list(lines, from, depth); }
  const rule = lines[from + 1]?.text.trim(), sides = rule && first.text.includes("|") && TABLE_RULE.test(rule)
    ? rule.match(/:?-+:?/g).map((side) => [side.startsWith(":"), side.endsWith(":")]) : [];
  if (sides.length && sides.length <= MOST_COLUMNS) {
    const end = until((text) => !text.includes("|")), body = make("tbody");
    for (const line of lines.slice(from + 2, end)) { body.append(cells("td", line)); }
    const table = make("table", make("thead", cells("th", first)), body);
    for (const row of table.rows) {
      [...row.cells].forEach((cell, k) => {
        const [left, right] = sides[k] || [];
        if (right) { cell.className = left ? "center" : "right"; }
      });
    }
    return [table, end];
  }
  const end = until((text) => !text.trim() || (depth < DEEPEST && STARTS.some((one) => one.test(text))));
  return [paragraph("p", lines.slice(from, end)), end];
}

function list(lines, from, depth) {
  const ordered = /\d/.test(ITEM.exec(lines[from].text)[2]), element = make(ordered ? "ol" : "ul");
  const first = parseInt(ITEM.exec(lines[from].text)[2], 10);
  if (ordered && first !== 1) { element.start = first; }
  let here = from;
  for (;;) {
    const found = here < lines.length && ITEM.exec(lines[here].text);
    if (!found || RULE.test(lines[here].text) || /\d/.test(found[2]) !== ordered) { break; }
    const width = found[0].length, own = [cut(lines[here], width)];
    for (here += 1; here < lines.length; here += 1) {
      const line = lines[here], lead = line.text.length - line.text.trimStart().length;
      const isBlank = !line.text.trim(), isNext = ITEM.test(line.text) && lead < Math.min(width, 2);
      // A line that is not indented still belongs to the item's paragraph.
      const goesOn = own.at(-1).text.trim() && !STARTS.some((one) => one.test(line.text));
      if (isNext || !(isBlank || lead >= Math.min(width, 2) || goesOn)) { break; }
      own.push(cut(line, Math.min(lead, width)));
    }
    const item = make("li"), inner = blocks(own, depth + 1), leading = inner.next().value;
    // One paragraph in an item needs no space around it.
    if (leading) { fill(item, leading.tagName === "P" ? [...leading.childNodes] : [leading]); }
    element.append(fill(item, inner));
  }
  return [element, here];
}

/** Yields the elements of lines. */
function* blocks(lines, depth = 0) {
  for (let here = 0; here < lines.length;) {
    if (!lines[here].text.trim()) { here += 1; continue; }
    const [element, end] = block(lines, here, depth);
    if (!depth) { element.source = `${lines[here].at} ${lines.slice(here, end).map((line) => line.text).join("\n")}`; }
    here = end;
    yield element;
  }
}

/**
 * Shows Markdown; what was shown already and has not changed stays, and so does a selection.
 *
 * Throws a RangeError where it would need more nodes than a page shows in good time.
 */
function renderMarkdown(target, source) {
  let at = 0;
  const lines = source.split("\n").map((text) => {
    const line = { text, at };
    at += text.length + 1;
    return line;
  });
  room = MOST_NODES;
  let made = [];
  try { made = [...blocks(lines)]; } finally { room = Infinity; }
  const same = made.findIndex((element, k) => target.children[k]?.source !== element.source);
  const kept = same < 0 ? made.length : same;
  while (target.childNodes.length > kept) { target.lastChild.remove(); }
  fill(target, made.slice(kept));
}
