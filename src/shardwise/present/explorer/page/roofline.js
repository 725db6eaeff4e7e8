// Kernels of one block against the chip's roofline.

import { around, axes, path } from "./chart.js";
import { h, numbers, panel, svg } from "./dom.js";
import { bytes, digits, percent, quantity, seconds } from "./format.js";
import { fill, legend, number } from "./numbers.js";

export function drawRoofline(payload, context) {
  const { roofline } = payload;
  const peak = roofline.peak_flops_per_s,
    rate = roofline.memory_bytes_per_s;
  const kernels = roofline.operations.filter((one) => one.flops > 0);
  const intensities = [...kernels.map((one) => one.intensity), roofline.critical_intensity];
  const x = {
    domain: around(intensities, true, 0.6),
    log: true,
    label: "intensity, FLOPs per byte moved",
    format: (value) => quantity(value),
  };
  const reached = kernels.map((one) => one.flops / one.time_s);
  const y = {
    domain: around([...reached, peak, x.domain[0] * rate], true, 0.2),
    log: true,
    label: "FLOP/s of a device",
    format: (value) => quantity(value, ""),
  };
  const figure = axes({
    width: Math.max(context.width, 300),
    height: 280,
    x,
    y,
    label: `roofline of a block's kernels on ${roofline.chip}`,
  });
  const knee = roofline.critical_intensity;
  figure.marks.append(
    path(
      [
        [x.domain[0], x.domain[0] * rate],
        [knee, peak],
        [x.domain[1], peak],
      ].map(([a, b]) => [figure.x(a), figure.y(b)]),
      { class: "roof" },
    ),
  );
  figure.marks.append(
    svg(
      "text",
      { class: "axis", x: figure.x(x.domain[1]) - 4, y: figure.y(peak) - 6, "text-anchor": "end" },
      `${quantity(peak, "FLOP/s")} ${roofline.dtype}`,
    ),
  );
  for (const [index, one] of roofline.operations.entries()) {
    if (!one.flops) continue;
    const said = `${one.phase} ${one.name}: ${digits(one.intensity)} FLOPs/byte, ${seconds(one.time_s)}, bound by ${one.bound}`;
    const [cx, cy] = [figure.x(one.intensity), figure.y(one.flops / one.time_s)];
    const shape =
      one.phase === "forward"
        ? svg("circle", { cx, cy, r: 5 })
        : svg("path", { d: `M${cx} ${cy - 6}L${cx + 6} ${cy + 5}H${cx - 6}Z` });
    shape.style.fill = fill(one.phase);
    if (context.why) shape.addEventListener("click", () => context.why(`roofline.operations.${index}.time_s`));
    shape.append(svg("title", {}, said));
    figure.marks.append(shape);
  }
  const heads = ["kernel", "phase", "FLOPs", "moved", "intensity", "time", "bound by"];
  const said = (text, name) => number(text, `roofline.${name}`, context);
  const rows = roofline.operations.map((one, index) => [
    one.name,
    one.phase,
    said(quantity(one.flops), `operations.${index}.flops`),
    said(bytes(one.moved_bytes), `operations.${index}.moved_bytes`),
    said(digits(one.intensity), `operations.${index}.intensity`),
    said(seconds(one.time_s), `operations.${index}.time_s`),
    one.bound,
  ]);
  return panel(
    "Roofline of a block",
    {},
    h(
      "p",
      { class: "lead" },
      number(percent(payload.memory_bound_share), "memory_bound_share", context),
      " of a block's time is bound by memory; compute binds from ",
      said(digits(knee), "critical_intensity"),
      " FLOPs per byte on",
    ),
    legend(["forward", "backward"]),
    figure.root,
    h(
      "p",
      { class: "quiet" },
      `One device's kernels at the vendor's peak and bandwidth: time = max(FLOPs / peak, bytes / bandwidth). Circles run forward, triangles backward.`,
    ),
    numbers("kernels of one block on one device", heads, rows),
  );
}
