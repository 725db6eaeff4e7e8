// The provenance of a number: formula, inputs, source, and what kind of number it is.

import { h, table } from "./dom.js";
import { inUnit } from "./format.js";
import { provenance } from "./provenance.js";

export function drawWhy(why, close) {
  const inputs = why.inputs.map((input) => [input.symbol, inUnit(input.value, input.unit), input.meaning]);
  const meanings = why.inputs.some((input) => input.meaning);
  const derived = why.derived.map((part) => [part.what, part.expression, inUnit(part.value, "")]);
  const interval = why.interval90
    ? ` (90%: ${inUnit(why.interval90[0], why.unit)} to ${inUnit(why.interval90[1], why.unit)})`
    : "";
  return h(
    "div",
    { class: "why-body" },
    h(
      "p",
      { class: "head" },
      h("strong", {}, why.name),
      h("button", { type: "button", class: "close", onclick: close, "aria-label": "close" }, "✕"),
    ),
    h(
      "p",
      { class: "lead" },
      `${inUnit(why.value, why.unit)}${interval}`,
    ),
    h("p", {}, why.words),
    h(
      "dl",
      {},
      h("dt", {}, "formula"),
      h("dd", {}, h("code", {}, why.formula)),
      h("dt", {}, "kind"),
      h("dd", {}, why.kind),
      h("dt", {}, "source"),
      h("dd", {}, why.source),
    ),
    inputs.length
      ? table(
          "inputs",
          ["symbol", "value", ...(meanings ? ["meaning"] : [])],
          inputs.map((row) => (meanings ? row : row.slice(0, 2))),
        )
      : null,
    derived.length ? table("derived expressions", ["what", "expression", "value"], derived) : null,
  );
}

// A dialog that shows the provenance of one number at a time; focus goes back to the number. What the payload lacks about its own
// numbers is asked for with `find`.
export class Why {
  constructor(find) {
    this.find = find;
    this.dialog = h("dialog", {
      class: "why-dialog",
      "aria-label": "where a number is from",
      onclick: (event) => {
        if (event.target === this.dialog) this.dialog.close();
      },
    });
    document.body.append(this.dialog);
    this.show = this.show.bind(this);
  }

  async show(name, payload) {
    const explanation = payload && provenance(payload, name);
    const answer = explanation ? { why: explanation } : await this.find(name);
    const body = answer?.why
      ? drawWhy(answer.why, () => this.dialog.close())
      : h("p", {}, (answer?.failed ?? answer?.problems)?.join("; ") ?? "nothing is known of this number");
    this.dialog.replaceChildren(body);
    if (!this.dialog.open) this.dialog.showModal();
  }
}
