// Reports as Python sends them: sections of texts, tables, facts, choices and charts.

import { drawChart, swatch } from "./chart.js";
import { colour, h, panel, table } from "./dom.js";

export const mark = (good) => h("span", { class: `mark ${good ? "good" : "bad"}`, "aria-hidden": "true" }, good ? "✓" : "✕");

// A cell: a text, a list of cells, or an object whose first key says what it is.
function cell(value, context) {
  if (Array.isArray(value)) return value.map((part) => cell(part, context));
  if (value.number !== undefined) return number(value, context);
  if (value.unknown !== undefined) return h("span", { class: "number unknown" }, value.unknown);
  if (value.status !== undefined) return h("span", { class: `status ${value.tone}` }, value.status);
  if (value.bar) return bar(value);
  if (value.action !== undefined) return action(value, context);
  return value;
}

// A number that opens its provenance; plain text where a report has none of it.
function number({ number: text, path }, { why }) {
  if (!why) return h("span", { class: "number" }, text);
  const title = "formula, inputs and source";
  return h("button", { type: "button", class: "number", "data-why": path, title, onclick: () => why(path) }, text);
}

function action({ action: text, edit, command }, { go, copy }) {
  if (command ? !copy : !go) return null;
  return h("button", { type: "button", class: "take", onclick: () => (command ? copy(command) : go(edit)) }, text);
}

const PARTS = { "+": "measured", "-": "predicted" };

function bar({ bar: parts, term }) {
  const width = (share) => `${(100 * share).toFixed(1)}%`;
  return h(
    "span",
    { class: "bar", "aria-hidden": "true" },
    parts.map(([kind, share]) => h("i", { class: PARTS[kind] ?? "", style: { width: width(share), color: colour(`term:${term}`) } })),
  );
}

const BLOCKS = {
  text: ({ text, style, indent }, context) => {
    const margin = indent ? { marginLeft: `${indent}ch` } : null;
    return h("p", { class: style || null, style: margin }, cell(text, context));
  },
  bullets: (block, context) => h("ul", {}, block.bullets.map((line) => h("li", {}, cell(line, context)))),
  facts: (block, context) => {
    const fact = ([name, value, note]) => [h("dt", {}, name), h("dd", {}, cell(value, context), h("small", {}, cell(note, context)))];
    return h("dl", { class: "facts" }, block.facts.map((row) => h("div", {}, fact(row))));
  },
  terms: (block, context) =>
    h(
      "ul",
      { class: "terms", "aria-label": block.title || null },
      block.title ? h("li", {}, h("span", {}), h("strong", {}, block.title)) : null,
      block.terms.map(([term, words, value, note]) =>
        h("li", {}, swatch(`term:${term}`), h("span", { class: "name" }, words), cell(value, context), h("span", { class: "share" }, note)),
      ),
    ),
  rows: (block, context) => {
    const rows = block.rows.map((row) => row.map((value) => cell(value, context)));
    const drawn = table(block.caption ?? "", cell(block.head, context), rows, block.right);
    return block.folded ? h("details", { class: "data" }, h("summary", {}, "as a table"), drawn) : drawn;
  },
  slider: drawSlider,
  choices: drawChoices,
  pre: (block) => h("pre", { tabindex: 0 }, block.pre),
  chart: (block, context) => drawChart(block.chart, context),
};

const drawBlock = (block, context) => BLOCKS[Object.keys(block)[0]](block, context);

// A control of a view: its value follows the thumb, the state follows when it is released.
function drawSlider({ slider: label, value, shown, options }, context) {
  if (!context.go) return h("p", {}, `${label}: `, cell(shown, context));
  const output = h("output", { for: "view-slider" }, cell(shown, context));
  const input = h("input", {
    id: "view-slider",
    type: "range",
    min: 0,
    max: options.length - 1,
    step: 1,
    onchange: () => context.go(options[input.value].edit),
    oninput: () => output.replaceChildren(options[input.value].value),
  });
  input.value = options.findIndex((option) => option.value === value);
  return h("div", { class: "control" }, h("label", { for: "view-slider" }, label), output, input);
}

// Selects, and the blocks of what is selected.
function drawChoices({ choices, names, start }, context) {
  const shown = h("div", {});
  const selects = names.map(([id, label], index) => {
    const values = [...new Set(choices.map(([keys]) => keys[index]))];
    const select = h("select", { id, onchange: () => pick() }, values.map((value) => h("option", { value }, value)));
    select.value = start[index];
    return [h("label", { for: id }, label), select];
  });
  const pick = () => {
    const chosen = selects.map(([, select]) => select.value).join();
    const [, blocks] = choices.find(([keys]) => keys.join() === chosen);
    shown.replaceChildren(h("div", {}, blocks.map((block) => drawBlock(block, context))));
  };
  pick();
  return [h("p", { class: "choose" }, selects), shown];
}

function drawSection(section, context) {
  const blocks = section.blocks?.map((block) => drawBlock(block, context)) ?? [];
  const style = section.style ?? "panel";
  if (section.fold) return h("details", { class: "panel folded" }, h("summary", {}, section.fold), blocks);
  if (!style.includes("verdict")) {
    return section.title ? panel(section.title, { class: style }, blocks) : h("section", { class: style }, blocks);
  }
  const title = section.mark ? [mark(section.mark === "good"), section.title ?? ""] : (section.title ?? "");
  const claims = section.claims?.map((claim) => h("span", { class: "claim" }, cell(claim, context)));
  return h("section", { class: style, "aria-label": "verdict" }, h("h1", {}, title, claims ?? []), blocks);
}

// The elements of a report, whose sections may have contexts of their own. Neighbours of half the width stand side by side.
export function drawReport(report, common) {
  const drawn = [];
  for (const section of report) {
    const context = section.context ?? common;
    const element = drawSection(section, section.half ? { ...context, width: context.half } : context);
    if (!section.half) drawn.push(element);
    else if (drawn.at(-1)?.className === "pair") drawn.at(-1).append(element);
    else drawn.push(h("div", { class: "pair" }, element));
  }
  return drawn;
}
