// Markdown to elements. Nothing is ever read as HTML, and each text node knows in `at` where its
// text begins in the source, so that tokens can be found in what is shown.

const PLACES = [
  ["escape", /\\(?<text>[!-/:-@[-`{-~])/dy],
  ["code", /(?<mark>`+)(?<text>[^`](?:[^]*?[^`])??)\k<mark>(?!`)/dy],
  ["strong", /\*\*(?=\S)(?<text>[^]*?\S)\*\*(?!\*)/dy],
  ["strong", /(?<!\w)__(?=\S)(?<text>[^]*?\S)__(?!\w)/dy],
  ["em", /\*(?<text>[^\s*](?:[^*]*?[^\s*])??)\*(?!\*)/dy],
  ["em", /(?<!\w)_(?=[^\s_])(?<text>[^_]*?[^\s_])_(?!\w)/dy],
  ["del", /~~(?=\S)(?<text>[^]*?\S)~~/dy],
  ["a", /!?\[(?<text>[^\]\n]+)\]\((?<url>[^()\s]*(?:\([^()\s]*\)[^()\s]*)*)\)/dy],
  ["a", /(?<text>https?:\/\/[^\s<>()]*[^\s<>().,;:!?'"*])/dy],
  ["br", /\n/dy],
];
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])( {1,4}|\t|$)/;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const HEADING = /^ {0,3}(#{1,6})( +|$)/;
const QUOTE = /^ {0,3}> ?/;
const TABLE_RULE = /^ *\|?( *:?-+:? *\|)+( *:?-+:? *)?$/;
const STARTS = [FENCE, ITEM, RULE, HEADING, QUOTE];

function make(name, ...children) {
  const element = document.createElement(name);
  element.append(...children);
  return element;
}

/** Puts source[from..to) of joined lines into an element; `at` has each character's place. */
function leaf(parent, { text, at }, from, to) {
  while (from < to) {
    let end = from + 1;
    while (end < to && at[end] === at[end - 1] + 1) { end += 1; }
    const node = document.createTextNode(text.slice(from, end));
    node.at = at[from];
    parent.append(node);
    from = end;
  }
}

function inline(parent, joined, from, to) {
  let plain = from, here = from;
  const part = { text: joined.text.slice(0, to), at: joined.at };
  while (here < to) {
    let found = null, name = "";
    for (const [kind, pattern] of PLACES) {
      pattern.lastIndex = here;
      found = pattern.exec(part.text);
      if (found) { name = kind; break; }
    }
    if (!found) { here += 1; continue; }
    leaf(parent, part, plain, here);
    const [start, end] = found.indices.groups?.text || [here, here];
    if (name === "escape") { leaf(parent, part, start, end); }
    else if (name === "a") { link(parent, part, start, end, found.groups.url ?? found.groups.text); }
    else {
      const element = make(name);
      if (name === "code") { leaf(element, part, start, end); }
      else { inline(element, part, start, end); }
      parent.append(element);
    }
    here = plain = here + found[0].length;
  }
  leaf(parent, part, plain, to);
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
  const row = make("tr");
  for (const found of line.text.replace(/\| *$/, "").matchAll(/(?:^\s*\|?|\|)((?:\\\||[^|])*)/g)) {
    const start = found.index + found[0].length - found[1].length;
    row.append(paragraph(name, [{ text: found[1], at: line.at + start }]));
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
  for (const found of language && language !== "text" ? all.text.matchAll(pattern) : []) {
    const end = found.index + found[0].length, word = make("span");
    word.className = ["comment", "string", "number", "keyword"].find((name) => found.groups[name] !== undefined);
    leaf(parent, all, here, found.index);
    leaf(word, all, found.index, end);
    parent.append(word);
    here = end;
  }
  leaf(parent, all, here, all.text.length);
}

/** Takes the block that begins with the first line; tells how many lines it has. */
function block(lines) {
  const first = lines[0], fence = FENCE.exec(first.text), heading = HEADING.exec(first.text);
  if (fence) {
    let end = 1;
    while (end < lines.length && !lines[end].text.trim().startsWith(fence[1])) { end += 1; }
    const code = make("code"), all = joined(lines.slice(1, end));
    highlight(code, all, fence[2].toLowerCase());
    return [make("pre", code), end + 1];
  }
  if (RULE.test(first.text)) { return [make("hr"), 1]; }
  if (heading) {
    const line = cut(first, heading[0].length);
    // The page has headings of its own above these.
    const level = Math.min(heading[1].length + 3, 6);
    return [paragraph(`h${level}`, [{ ...line, text: line.text.replace(/ +#+ *$/, "") }]), 1];
  }
  if (QUOTE.test(first.text)) {
    const end = until(lines, (line) => !QUOTE.test(line.text));
    const inner = lines.slice(0, end).map((line) => cut(line, QUOTE.exec(line.text)[0].length));
    return [make("blockquote", ...blocks(inner)), end];
  }
  if (ITEM.test(first.text)) { return list(lines); }
  if (first.text.includes("|") && lines.length > 1 && TABLE_RULE.test(lines[1].text)) {
    const end = until(lines, (line) => !line.text.includes("|"));
    const body = lines.slice(2, end).map((line) => cells("td", line));
    const table = make("table", make("thead", cells("th", first)), make("tbody", ...body));
    const sides = lines[1].text.match(/:?-+:?/g).map((rule) => [rule.startsWith(":"), rule.endsWith(":")]);
    for (const row of table.rows) {
      sides.forEach(([left, right], k) => {
        if (right && row.cells[k]) { row.cells[k].className = left ? "center" : "right"; }
      });
    }
    return [table, end];
  }
  const end = until(lines, (line) => !line.text.trim() || STARTS.some((one) => one.test(line.text)));
  return [paragraph("p", lines.slice(0, end)), end];
}

function until(lines, isAfter) {
  let end = 1;
  while (end < lines.length && !isAfter(lines[end])) { end += 1; }
  return end;
}

function list(lines) {
  const ordered = /\d/.test(ITEM.exec(lines[0].text)[2]), element = make(ordered ? "ol" : "ul");
  const first = parseInt(ITEM.exec(lines[0].text)[2], 10);
  if (ordered && first !== 1) { element.start = first; }
  let here = 0;
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
    const inner = [...blocks(own)];
    // One paragraph in an item needs no space around it.
    if (inner[0]?.tagName === "P") { inner.splice(0, 1, ...inner[0].childNodes); }
    element.append(make("li", ...inner));
  }
  return [element, here];
}

function* blocks(lines) {
  for (let here = 0; here < lines.length;) {
    if (!lines[here].text.trim()) { here += 1; continue; }
    const [element, count] = block(lines.slice(here));
    const own = lines.slice(here, here + count).map((line) => line.text);
    element.source = `${lines[here].at} ${own.join("\n")}`;
    here += count;
    yield element;
  }
}

/** Shows Markdown; what was shown already and has not changed stays, and so does a selection. */
function renderMarkdown(target, source) {
  let at = 0;
  const lines = source.split("\n").map((text) => {
    const line = { text, at };
    at += text.length + 1;
    return line;
  });
  const made = [...blocks(lines)];
  const same = made.findIndex((element, k) => target.children[k]?.source !== element.source);
  const kept = same < 0 ? made.length : same;
  while (target.children.length > kept) { target.lastChild.remove(); }
  target.append(...made.slice(kept));
}
