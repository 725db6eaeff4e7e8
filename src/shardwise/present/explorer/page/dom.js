// Elements of the page. Text becomes text nodes only: nothing that comes from data is ever parsed as markup.

const SVG = "http://www.w3.org/2000/svg";

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return element;
}

// An HTML element; attributes that begin with "on" are listeners.
export function h(tag, attributes, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

// An SVG element.
export function svg(tag, attributes, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

export const PANEL = 34; // pixels of a panel's padding and border, left and right together

// The width of what an element holds, in whole pixels.
export function innerWidth(element) {
  const style = getComputedStyle(element);
  return Math.round(element.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight));
}

export function toggleTheme() {
  const root = document.documentElement;
  const theme = root.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  root.dataset.theme = theme === "dark" ? "light" : "dark";
}

// A section with a heading; `id` names it for the reader's list of landmarks.
export function panel(title, attributes, ...children) {
  const id = `panel-${title.toLowerCase().replaceAll(/[^a-z]+/g, "-")}`;
  return h(
    "section",
    { "aria-labelledby": id, ...attributes },
    h("h2", { id }, title),
    ...children,
  );
}

// A table: rows of cells under a head, if there is one; the columns in `right` end at the same place.
export function table(caption, head, rows, right = []) {
  const kind = (column) => (right.includes(column) ? "right" : null);
  const row = (cells) => cells.map((cell, column) => h(column ? "td" : "th", column ? { class: kind(column) } : { scope: "row" }, cell));
  return h(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": caption || "table" },
    h(
      "table",
      { class: head.length ? null : "narrow" },
      caption ? h("caption", {}, caption) : null,
      head.length ? h("thead", {}, h("tr", {}, head.map((cell, column) => h("th", { scope: "col", class: kind(column) }, cell)))) : null,
      h("tbody", {}, rows.map((cells) => h("tr", {}, row(cells)))),
    ),
  );
}

// A colour of charts by its name, such as "term:fsdp", "series:3" and "ink", as the style sheet has it; and that of text on it.
export function colour(name) {
  const [kind, key] = name.replaceAll(" ", "-").split(":");
  return key ? `var(--${kind}-${key}, var(--faint))` : `var(--${kind})`;
}

export const onColour = (name) => `var(--on-${name.replace("term:", "").replaceAll(/[ :]/g, "-")}, var(--paper))`;
