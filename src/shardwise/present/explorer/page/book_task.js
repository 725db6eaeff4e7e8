// A task of the books: its goal, the numbers that it asks for, a hint with its source; and the menu of all tasks.

import { h } from "./dom.js";
import { inUnit, percent } from "./format.js";

const STORED = "shardwise-tasks"; // names of the tasks that were done in this browser

function doneTasks() {
  try {
    return JSON.parse(localStorage.getItem(STORED) ?? "[]");
  } catch {
    return []; // no storage, as in a private window
  }
}

function remember(name) {
  const names = doneTasks();
  if (names.includes(name)) return;
  try {
    localStorage.setItem(STORED, JSON.stringify([...names, name]));
  } catch {
    return; // the mark in the menu is lost with the page
  }
}

// The section above a view; null where no task is worked on.
export function drawTask(task, go) {
  if (!task) return null;
  if (task.done) remember(task.name);
  const met = task.requirements.filter((requirement) => requirement.met).length;
  return h(
    "section",
    { class: `task ${task.done ? "done" : ""}`, "aria-labelledby": "task-title" },
    h(
      "p",
      { class: "head" },
      h("strong", { id: "task-title" }, task.title),
      h("button", { type: "button", onclick: () => go(task.start) }, "start again"),
      h("button", { type: "button", class: "close", onclick: () => go(null), "aria-label": "leave the task" }, "✕"),
    ),
    h("p", {}, task.goal),
    h(
      "p",
      { class: "met" },
      task.done ? "Done: every number is reached." : `${met} of ${task.requirements.length} reached`,
      h("progress", { max: task.requirements.length, value: met, "aria-label": "numbers that are reached" }),
    ),
    h("ul", { class: "requirements" }, task.requirements.map(requirementRow)),
    h(
      "details",
      { class: "data" },
      h("summary", {}, "hint"),
      h("p", {}, task.hint),
      h("p", { class: "quiet" }, h("a", { href: task.url, rel: "noreferrer noopener", target: "_blank" }, task.source)),
    ),
  );
}

function requirementRow({ label, value, comparison, target, unit, met }) {
  const number = value === null ? "-" : inUnit(value, unit);
  const aim = ` ${comparison} ${unit === "%" ? percent(target, 0) : inUnit(target, unit)}`;
  const text = comparison ? [h("span", { class: "number" }, number), aim] : met ? "yes" : "changed";
  return h(
    "li",
    { class: met ? "met" : "" },
    h("span", { class: `mark ${met ? "good" : "bad"}`, role: "img", "aria-label": met ? "reached" : "not reached" }, met ? "✓" : "✕"),
    h("span", { class: "name" }, label),
    h("span", {}, text),
  );
}

// A menu of all tasks; those that were done have a mark.
export function taskMenu(tasks, current, open) {
  const done = doneTasks();
  const menu = h(
    "details",
    { class: "menu" },
    h("summary", {}, "Tasks"),
    h(
      "ul",
      {},
      tasks.map(({ name, title }) =>
        h(
          "li",
          {},
          h(
            "a",
            {
              href: `?task=${name}`,
              "aria-current": name === current ? "page" : null,
              onclick: (event) => {
                event.preventDefault();
                menu.open = false;
                open(`task=${name}`);
              },
            },
            title,
            done.includes(name) ? h("span", { class: "done", "aria-label": "done" }, " ✓") : null,
          ),
        ),
      ),
    ),
  );
  menu.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !menu.open) return;
    menu.open = false;
    menu.querySelector("summary").focus();
  });
  menu.addEventListener("focusout", (event) => {
    if (!menu.contains(event.relatedTarget)) menu.open = false;
  });
  return menu;
}
