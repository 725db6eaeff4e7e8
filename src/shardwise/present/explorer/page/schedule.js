// The order of a pipeline's passes, rank by rank, and all schedules side by side.

import { h, numbers, panel, svg, table } from "./dom.js";
import { count, digits, percent, seconds } from "./format.js";
import { fill, number, textOn, truncated } from "./numbers.js";

const ROW = 26,
  LEFT = 60;
const KINDS = {
  F: ["forward", "forward"],
  B: ["backward", "backward"],
  I: ["backward for activations", "backward for activations"],
  W: ["backward for weights", "backward for weights"],
};
// An action as torch.distributed.pipelining writes it, stage, kind and micro-batch, in words.
export function inWords(action) {
  const [, stage, kind, micro] = action.match(/^(\d+)([FBIW])(\d+)$/) ?? [];
  return kind ? `${KINDS[kind][1]} of micro-batch ${micro} through stage ${stage}` : action;
}

// The class of a label that fits into so many pixels; null where none does.
export const labelSize = (text, room) =>
  room > 7.2 * text.length + 2 ? "" : room > 5.8 * text.length + 1 ? "thin" : null;

const kindOf = (action) => action.match(/[FBIW]/)?.[0] ?? "F";

export function drawSchedule(payload, context) {
  const { schedule: line, compared } = payload;
  const slots = line.ranks.reduce((sum, rank) => sum + rank.slots.length, 0);
  const longest = Math.max(...line.ranks.map((rank) => rank.slots.length));
  const width = Math.max(context.width, 300, Math.min(longest * 9, 4000)),
    per = (width - LEFT - 8) / line.makespan_s;
  const used = new Set();
  const figure = svg(
    "svg",
    {
      class: "figure",
      viewBox: `0 0 ${width} ${line.ranks.length * (ROW + 4) + 4}`,
      width,
      height: line.ranks.length * (ROW + 4) + 4,
      role: "img",
      "aria-label": `${line.schedule}: ${slots} passes on ${line.ranks.length} ranks`,
    },
    line.ranks.map((rank, index) =>
      svg(
        "g",
        { transform: `translate(${LEFT} ${index * (ROW + 4) + 2})` },
        svg("text", { x: -8, y: ROW / 2 + 4, "text-anchor": "end" }, `rank ${rank.rank}`),
        svg("rect", { class: "empty", width: line.makespan_s * per, height: ROW }),
        rank.slots.map((slot) => drawn(slot, per, used)),
      ),
    ),
  );
  const linked = (text, name) => number(text, `schedule.${name}`, context);
  const keys = [...used].map((kind) =>
    h(
      "li",
      {},
      h("span", { class: "swatch", style: { background: fill(KINDS[kind][0]) } }),
      `${kind}: ${KINDS[kind][1]}`,
    ),
  );
  return [
    panel(
      "Schedule",
      {},
      h(
        "p",
        { class: "lead" },
        `${line.schedule}: `,
      linked(count(line.stages), "stages"),
      line.stages === 1 ? " stage, " : " stages, ",
      linked(count(line.micro_batches), "micro_batches"),
      " micro-batches; bubble ",
      linked(percent(line.bubble), "bubble"),
      " of the ideal time; ranks are idle for ",
      linked(percent(line.idle_fraction), "idle_fraction"),
      " of the step and hold at most ",
      linked(digits(line.peak_activations), "peak_activations"),
      " micro-batches",
      ),
      truncated(payload.shown),
      h("ul", { class: "legend" }, keys),
      h("div", { class: "scroll" }, figure),
      h(
        "p",
        { class: "quiet" },
        "stages alike, with the estimate's seconds ",
        context.copy && h("button", { type: "button", class: "take", onclick: () => context.copy(payload.command) }, "copy the command"),
      ),
      numbers(
        "what ranks do",
        ["rank", "idle", "waits", "micro-batches held"],
        line.ranks.map((rank, index) => [
          rank.rank,
          linked(seconds(rank.idle_s), `ranks.${index}.idle_s`),
          linked(seconds(rank.wait_s), `ranks.${index}.wait_s`),
          linked(digits(rank.peak_activations), `ranks.${index}.peak_activations`),
        ]),
      ),
    ),
    panel(
      "All schedules",
      {},
      compared.rows.length
        ? table(
            `the same stages under each schedule${compared.micro_batches < compared.num_micro_batches ? `, ${count(compared.micro_batches)} of ${count(compared.num_micro_batches)} micro-batches` : ""}`,
            ["schedule", "virtual stages", "bubble", "micro-batches held", "messages"],
            compared.rows.map((row, index) => [
              row.schedule === line.schedule && row.virtual_stages === line.virtual_stages
                ? h("strong", {}, `${row.schedule} (this layout)`)
                : row.schedule,
              row.virtual_stages,
              number(percent(row.bubble), `compared.rows.${index}.bubble`, context),
              number(digits(row.peak_activations), `compared.rows.${index}.peak_activations`, context),
              number(count(row.messages), `compared.rows.${index}.messages`, context),
            ]),
          )
        : h("p", { class: "quiet" }, compared.problem),
    ),
  ];
}

function drawn(slot, per, used) {
  const width = (slot.end_s - slot.start_s) * per;
  return slot.actions.map((action, index) => {
    const kind = kindOf(action),
      high = ROW / slot.actions.length;
    used.add(kind);
    const label = action.replace(/^\d+/, "").slice(1);
    return svg(
      "g",
      { transform: `translate(${slot.start_s * per} ${index * high})` },
      svg("title", {}, `${inWords(action)}, ${seconds(slot.end_s - slot.start_s)}`),
      svg("rect", { class: "pass", width: Math.max(width, 0.5), height: high, style: { fill: fill(KINDS[kind][0]) } }),
      labelSize(label, width) !== null &&
        high > 12 &&
        svg(
          "text",
          { class: labelSize(label, width), x: width / 2, y: high / 2 + 4, "text-anchor": "middle", style: { fill: textOn(KINDS[kind][0]) } },
          label,
        ),
    );
  });
}
