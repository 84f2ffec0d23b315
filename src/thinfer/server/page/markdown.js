// A small part of Markdown as DOM nodes. Everything a model writes goes through textContent: no HTML is ever parsed.

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const HEADING = /^(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const TABLE_RULE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)+\|?\s*$/;
// In order: code, link, bare address, strong, emphasis, strike. No pattern repeats over what another repeats over.
const INLINE = new RegExp(
  [
    "(?<tick>`{1,4})(?<code>[^`]+)\\k<tick>(?!`)",
    "\\[(?<label>[^\\]\\n]{1,400})\\]\\((?<href>[^\\s()]{1,1000})\\)",
    "(?<url>https?:\\/\\/[^\\s<>()\"'`]{1,1000}[^\\s<>()\"'`.,;:!?])",
    "\\*\\*(?<strong>(?=\\S)[^\\n]{1,2000}?\\S)\\*\\*",
    "(?<!\\w)__(?<strong2>(?=\\S)[^\\n_]{1,2000})__(?!\\w)",
    "\\*(?<em>(?=\\S)[^*\\n]{1,2000}?)(?<=\\S)\\*",
    "(?<!\\w)_(?<em2>(?=\\S)[^_\\n]{1,2000})_(?!\\w)",
    "~~(?<del>[^~\\n]{1,2000})~~",
  ].join("|"),
  "g",
);
const MOST_NESTING = 6;

/** Splits a text into blocks: {type, raw, ...}. Equal `raw` and `type` mean an equal block. */
export function parse(text) {
  const lines = text.replace(/\r\n?/g, "\n").split("\n");
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    const start = at;
    const block = takeBlock(lines, at);
    at = block.next;
    if (block.type !== "blank") blocks.push({ ...block, raw: lines.slice(start, at).join("\n") });
  }
  return blocks;
}

function takeBlock(lines, at) {
  const line = lines[at];
  if (!line.trim()) return { type: "blank", next: at + 1 };
  const fence = FENCE.exec(line);
  if (fence) return takeFence(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) return { type: "heading", level: heading[1].length, text: heading[2], next: at + 1 };
  if (RULE.test(line)) return { type: "rule", next: at + 1 };
  if (QUOTE.test(line)) {
    const end = runOf(lines, at, (l) => QUOTE.test(l));
    return { type: "quote", text: lines.slice(at, end).map((l) => QUOTE.exec(l)[1]).join("\n"), next: end };
  }
  if (ITEM.test(line)) return takeList(lines, at);
  if (line.includes("|") && TABLE_RULE.test(lines[at + 1] ?? "")) {
    const end = runOf(lines, at + 2, (l) => l.includes("|") && l.trim() !== "");
    const rows = [line, ...lines.slice(at + 2, end)].map(cells);
    return { type: "table", rows, next: end };
  }
  const end = runOf(lines, at + 1, (l) => l.trim() && !startsBlock(l));
  return { type: "paragraph", text: lines.slice(at, end).join("\n"), next: end };
}

function takeFence(lines, at, [, mark, language]) {
  let end = at + 1;
  const closes = (l) => l.trim().startsWith(mark) && l.trim().replaceAll(mark[0], "") === "";
  while (end < lines.length && !closes(lines[end])) end += 1;
  const text = lines.slice(at + 1, end).join("\n");
  return { type: "code", language, text, next: Math.min(end + 1, lines.length) };
}

function takeList(lines, at) {
  const [, indent, mark] = ITEM.exec(lines[at]);
  const ordered = /\d/.test(mark);
  const items = [];
  let end = at;
  while (end < lines.length) {
    const item = ITEM.exec(lines[end]);
    if (item && item[1].length <= indent.length + 1) {
      if (/\d/.test(item[2]) !== ordered) break;
      items.push([item[3]]);
    } else if (/^\s+\S/.test(lines[end])) {
      items.at(-1).push(lines[end].replace(/^ {1,4}|^\t/, ""));
    } else if (!lines[end].trim() && /^\s+\S/.test(lines[end + 1] ?? "")) {
      items.at(-1).push("");
    } else if (!lines[end].trim() && ITEM.test(lines[end + 1] ?? "")) {
      // A loose list: the empty line belongs to it.
    } else if (lines[end].trim() && !startsBlock(lines[end]) && lines[end - 1].trim()) {
      items.at(-1).push(lines[end]);
    } else {
      break;
    }
    end += 1;
  }
  return { type: "list", ordered, start: ordered ? Number.parseInt(mark, 10) : 1, items, next: end };
}

function startsBlock(line) {
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line);
}

function runOf(lines, at, test) {
  let end = at;
  while (end < lines.length && test(lines[end])) end += 1;
  return end;
}

function cells(line) {
  return line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
}

/** Makes `root` show a text; blocks that did not change keep their nodes, so that a selection survives streaming. */
export function render(root, text) {
  const blocks = parse(text);
  const old = root.shownBlocks ?? [];
  let same = 0;
  while (same < blocks.length && same < old.length && blocks[same].raw === old[same]) same += 1;
  while (root.childNodes.length > same) root.lastChild.remove();
  for (const block of blocks.slice(same)) root.append(blockNode(block, 0));
  root.shownBlocks = blocks.map((block) => block.raw);
}

function element(name, text) {
  const node = document.createElement(name);
  if (text !== undefined) node.textContent = text;
  return node;
}

function blockNode(block, depth) {
  if (block.type === "code") return codeNode(block);
  if (block.type === "rule") return element("hr");
  if (block.type === "table") return tableNode(block);
  if (block.type === "list") {
    const list = element(block.ordered ? "ol" : "ul");
    if (block.ordered && block.start !== 1) list.start = block.start;
    for (const lines of block.items) {
      const item = element("li");
      nested(item, lines.join("\n"), depth);
      list.append(item);
    }
    return list;
  }
  if (block.type === "quote") {
    const quote = element("blockquote");
    nested(quote, block.text, depth);
    return quote;
  }
  // The page has h1 and h2 of its own.
  const node = element(block.type === "heading" ? `h${Math.min(block.level + 2, 6)}` : "p");
  inline(node, block.text, 0);
  return node;
}

function nested(node, text, depth) {
  if (depth >= MOST_NESTING) {
    node.append(text);
    return;
  }
  const blocks = parse(text);
  if (blocks.length && blocks[0].type === "paragraph") inline(node, blocks.shift().text, 0);
  for (const block of blocks) node.append(blockNode(block, depth + 1));
}

function codeNode({ language, text }) {
  const figure = element("figure");
  figure.className = "code";
  const bar = element("figcaption");
  bar.append(element("span", language || "text"));
  const copy = element("button", "Copy");
  copy.type = "button";
  copy.className = "link";
  copy.dataset.copy = "code";
  bar.append(copy);
  const pre = element("pre");
  pre.tabIndex = 0;
  pre.append(element("code", text));
  figure.append(bar, pre);
  return figure;
}

function tableNode({ rows }) {
  const wrap = element("div");
  wrap.className = "table";
  wrap.tabIndex = 0;
  const table = element("table");
  rows.forEach((row, place) => {
    const line = element("tr");
    for (const cell of row.slice(0, rows[0].length)) {
      const node = element(place === 0 ? "th" : "td");
      inline(node, cell, 0);
      line.append(node);
    }
    table.append(line);
  });
  wrap.append(table);
  return wrap;
}

function inline(node, text, depth) {
  let from = 0;
  // matchAll works on a copy of the pattern, so that the calls inside keep their own place.
  for (const match of depth < MOST_NESTING ? text.matchAll(INLINE) : []) {
    if (match.index > from) node.append(text.slice(from, match.index));
    node.append(inlineNode(match.groups, match[0], depth));
    from = match.index + match[0].length;
  }
  if (from < text.length) node.append(text.slice(from));
}

function inlineNode(found, whole, depth) {
  if (found.code !== undefined) return element("code", found.code);
  if (found.href !== undefined) return linkNode(found.href, found.label, whole);
  if (found.url !== undefined) return linkNode(found.url, found.url, whole);
  const strong = found.strong ?? found.strong2;
  const node = element(strong !== undefined ? "strong" : found.del !== undefined ? "del" : "em");
  inline(node, strong ?? found.em ?? found.em2 ?? found.del, depth + 1);
  return node;
}

function linkNode(href, label, whole) {
  let url;
  try {
    url = new URL(href);
  } catch {
    return document.createTextNode(whole);
  }
  // javascript:, data: and the like stay text.
  if (url.protocol !== "https:" && url.protocol !== "http:") return document.createTextNode(whole);
  const link = element("a", label);
  link.href = url.href;
  link.target = "_blank";
  link.rel = "noopener noreferrer";
  link.title = url.href;
  return link;
}
