// The memory widget: sizes and degrees on sliders, the cluster follows.

import { drawMemory } from "./bars.js";
import { h } from "./dom.js";
import { drawVerdict, headroom, mark } from "./overview.js";

export function drawWidget(payload, here) {
  const presets = payload.presets.map((one) =>
    h("button", { type: "button", class: "take", onclick: () => here.go(one.edit) }, one.value),
  );
  const row = h("p", { class: "quiet" }, "models: ", presets);
  if (payload.problems.length) return [drawVerdict(payload, here), row];
  const [one] = payload.memory.layouts;
  const claims = [headroom(one, here), `on ${payload.cluster_name}`];
  const title = h("h1", {}, [mark(one.fits), claims.map((claim) => h("span", { class: "claim" }, claim))]);
  return [
    h("section", { class: "verdict" }, title, h("p", { class: "quiet" }, payload.layout_text), row),
    drawMemory(payload.memory, here),
  ];
}
