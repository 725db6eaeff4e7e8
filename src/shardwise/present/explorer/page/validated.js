// Published runs: predicted against measured.

import { around, axes, path } from "./chart.js";
import { h, panel, svg, table } from "./dom.js";
import { count, percent, seconds } from "./format.js";

export function drawValidation(found, context) {
  const rows = found.rows.filter((row) => row.predicted_step_time_s && row.measured_step_time_s);
  const every = rows.flatMap((row) => [row.predicted_step_time_s, row.measured_step_time_s]);
  const shape = { domain: around(every, true), log: true, format: seconds };
  const figure = axes({
    width: Math.max(Math.min(context.width, 760), 300),
    height: 460,
    label: "predicted against measured step times",
    x: { ...shape, label: "measured step" },
    y: { ...shape, label: "predicted step" },
  });
  const [low, high] = shape.domain;
  for (const [factor, name] of [
    [1, "roof"],
    [1.25, "limit"],
    [0.8, "limit"],
  ])
    figure.marks.append(
      path(
        [
          [figure.x(low), figure.y(low * factor)],
          [figure.x(high), figure.y(high * factor)],
        ],
        { class: name },
      ),
    );
  figure.marks.append(
    ...rows.map((row) =>
      svg(
        "circle",
        {
          class: "searched run",
          cx: figure.x(row.measured_step_time_s),
          cy: figure.y(row.predicted_step_time_s),
          r: 3,
        },
        svg(
          "title",
          {},
          `${row.id}: ${seconds(row.measured_step_time_s)} measured, ${seconds(row.predicted_step_time_s)} predicted`,
        ),
      ),
    ),
  );
  const tables = (summary, caption) =>
    Object.entries(summary)
      .filter(([, groups]) => Object.keys(groups).length)
      .map(([name, groups]) =>
        table(
          `${caption} by ${name}`,
          [name, "runs", "mean error", "median", "90th percentile"],
          Object.entries(groups).map(([key, one]) => [
            key,
            count(one.num_rows),
            percent(one.mean),
            percent(one.median),
            percent(one.p90),
          ]),
        ),
      );
  return [
    panel(
      "Predicted against measured",
      {},
      h(
        "p",
        { class: "lead" },
        `${count(rows.length)} published runs; the line is a prediction that is right, dashed lines are 25% off`,
      ),
      figure.root,
    ),
    panel("Errors of step times", { class: "tables" }, tables(found.summary, "step times")),
    panel("Errors of peak memory", { class: "tables" }, tables(found.memory_summary, "peak memory")),
  ];
}
