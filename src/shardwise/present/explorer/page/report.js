// A report of a command: its payload in the page, drawn by the explorer's own modules. It asks for nothing.

import { PANEL, h, innerWidth, toggleTheme } from "./dom.js";
import { drawReport, mark } from "./sections.js";
import { Why } from "./why.js";

const SCHEMA = "shardwise.report/1";
const KINDS = ["plan", "explain", "reconcile", "validate", "sweep"];
const content = document.getElementById("content");

// Sections of a plan's views, each with its payload; of another command those of its report.
function drawSections({ kind, payload, report }, width) {
  const context = { width, half: width > 760 ? (width - 50) / 2 : width };
  if (kind !== "plan") return drawReport(report, { ...context, payload });
  const why = new Why(async (name) => ({ why: payload.why[name] }));
  const sections = Object.values(payload.views).flatMap((view) => {
    const ofView = { ...context, payload: view, why: (name) => why.show(name, view) };
    return view.report.map((section) => ({ ...section, context: ofView }));
  });
  return drawReport(sections);
}

function broken(reason) {
  content.replaceChildren(
    h(
      "section",
      { class: "verdict cannot", role: "alert" },
      h("h1", {}, mark(false), "This report cannot be read"),
      h("p", {}, `${reason}; write it again with this version of shardwise`),
    ),
  );
}

// The values of the page, or null after saying what is wrong with them.
function read() {
  let values = null;
  try {
    values = JSON.parse(document.getElementById("payload").textContent);
  } catch (error) {
    broken(`its payload is not JSON (${error.message})`);
    return null;
  }
  if (values?.schema !== SCHEMA || !KINDS.includes(values.kind)) {
    broken(`found schema ${values?.schema} of kind ${values?.kind}; ${SCHEMA} is required`);
    return null;
  }
  return values;
}

function draw(values) {
  try {
    content.replaceChildren(h("h1", {}, values.title), ...drawSections(values, innerWidth(content) - PANEL));
  } catch (error) {
    broken(`its payload lacks what a report of a ${values.kind} has (${error.message})`);
  }
}

const values = read();
const theme = h("button", { type: "button", onclick: toggleTheme, "aria-label": "light or dark" }, "◐");
const name = h("strong", { class: "name" }, "shardwise"),
  kind = h("nav", {}, values ? values.kind : "report");
document.getElementById("head").replaceChildren(name, kind, h("div", { class: "tools" }, theme));
if (values) {
  draw(values);
  let resizing = null;
  addEventListener("resize", () => {
    clearTimeout(resizing);
    resizing = setTimeout(() => draw(values), 120);
  });
}
