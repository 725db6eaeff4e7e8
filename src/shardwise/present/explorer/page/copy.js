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

  async fill(target) {
    const found = await this.ask(target);
    if (!found.targets) {
      this.texts.replaceChildren(...(found.failed ?? found.problems).map((problem) => h("p", {}, problem)));
      return;
    }
    this.target.replaceChildren(
      ...found.targets.map((name) => h("option", { value: name, selected: name === found.target }, name)),
    );
    const files = Object.entries(found.files).map(([name, text]) =>
      h(
        "section",
        { class: "file" },
        h(
          "p",
          { class: "head" },
          h("strong", {}, name),
          h("button", { type: "button", onclick: (event) => put(text, event.target) }, "copy"),
        ),
        h("pre", { tabindex: 0 }, text),
      ),
    );
    const said = [...found.problems, ...found.notes].map((line) => h("li", {}, line));
    this.texts.replaceChildren(...files, ...(said.length ? [h("ul", { class: "quiet" }, said)] : []));
  }
}

async function put(text, button) {
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "copied";
  } catch {
    button.textContent = "select the text to copy it";
  }
}
