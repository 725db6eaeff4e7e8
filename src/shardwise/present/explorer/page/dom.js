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
export function inside(element) {
  const style = getComputedStyle(element);
  return Math.round(element.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight));
}

// A section with a heading; `id` names it for the reader's list of landmarks.
export function panel(title, attributes, ...children) {
  const id = `panel-${title.toLowerCase().replaceAll(/[^a-z]+/g, "-")}`;
  return h(
    "section",
    { ...attributes, "aria-labelledby": id, class: `panel ${attributes?.class ?? ""}` },
    h("h2", { id }, title),
    ...children,
  );
}

// A table: heads, rows of cells, and which columns are numbers.
export function table(caption, heads, rows) {
  const cell = (value, column) => h(column ? "td" : "th", column ? {} : { scope: "row" }, value);
  return h(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    h(
      "table",
      {},
      h("caption", {}, caption),
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          heads.map((head) => h("th", { scope: "col" }, head)),
        ),
      ),
      h(
        "tbody",
        {},
        rows.map((row) => h("tr", {}, row.map(cell))),
      ),
    ),
  );
}

// The numbers of a figure as a table, folded away.
export function numbers(caption, heads, rows) {
  return h("details", { class: "data" }, h("summary", {}, "as a table"), table(caption, heads, rows));
}
