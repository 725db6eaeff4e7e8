// The state as something to paste: a command, Python, or the launch of a framework.

import { h } from "./dom.js";

export class Copy {
  constructor(ask) {
    this.ask = ask;
    this.texts = h("div", { class: "texts" });
    this.target = h("select", { id: "copy-target", onchange: () => this.fill(this.target.value) });
    this.dialog = h(
      "dialog",
      { class: "copy-dialog", "aria-label": "copy as" },
      h(
        "p",
        { class: "head" },
        h("label", { for: "copy-target" }, "copy as"),
        this.target,
        h("button", { type: "button", class: "close", onclick: () => this.dialog.close(), "aria-label": "close" }, "✕"),
      ),
      this.texts,
    );
    document.body.append(this.dialog);
  }

  async open() {
    await this.fill("command");
    this.dialog.showModal();
  }

  // One text to paste, such as the command that prints a figure's numbers.
  show(name, text) {
    this.target.replaceChildren(h("option", {}, name));
    this.texts.replaceChildren(file(name, text));
    this.dialog.showModal();
  }

  async fill(target) {
    const copies = await this.ask(target);
    if (!copies.targets) {
      this.texts.replaceChildren(...(copies.failed ?? copies.problems).map((problem) => h("p", {}, problem)));
      return;
    }
    this.target.replaceChildren(
      ...copies.targets.map((name) => h("option", { value: name, selected: name === copies.target }, name)),
    );
    const files = Object.entries(copies.files).map(([name, text]) => file(name, text));
    const lines = [...copies.problems, ...copies.notes].map((line) => h("li", {}, line));
    this.texts.replaceChildren(...files, ...(lines.length ? [h("ul", { class: "quiet" }, lines)] : []));
  }
}

function file(name, text) {
  return h(
    "section",
    { class: "file" },
    h(
      "p",
      { class: "head" },
      h("strong", {}, name),
      h("button", { type: "button", onclick: (event) => put(text, event.target) }, "copy"),
    ),
    h("pre", { tabindex: 0 }, text),
  );
}

async function put(text, button) {
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "copied";
  } catch {
    button.textContent = "select the text to copy it";
  }
}
