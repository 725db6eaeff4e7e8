// Sliders, selects and checkboxes. What cannot run stays on them, and says why.

import { h } from "./dom.js";

const GROUPS = { job: "Job", layout: "Layout", model: "Sizes of the model" };

// The form of all choices, updated in place so that a slider keeps the pointer and the focus.
export class Controls {
  constructor(form, go) {
    Object.assign(this, { form, go, known: new Map(), dragged: null, order: "" });
    form.addEventListener("submit", (event) => event.preventDefault());
  }

  update(controls) {
    const order = controls.map((one) => one.name).join();
    if (order !== this.order) this.build(controls);
    this.order = order;
    for (const one of controls) if (one.name !== this.dragged) this.known.get(one.name).update(one);
  }

  build(controls) {
    const focused = document.activeElement?.id;
    const before = this.known;
    this.known = new Map(
      controls.map((one) => [
        one.name,
        reused(before.get(one.name), one) ?? new KINDS[one.kind](one, this),
      ]),
    );
    const groups = [...new Set(controls.map((one) => one.group))];
    const drawer = this.form.querySelector("details");
    const open = drawer ? drawer.open : matchMedia("(min-width: 861px)").matches;
    this.form.replaceChildren(
      h(
        "details",
        { class: "drawer", open },
        h("summary", {}, "change the job and the layout"),
        ...groups.map((group) =>
          h(
            "fieldset",
            {},
            h("legend", {}, GROUPS[group] ?? group),
            controls.filter((one) => one.group === group).map((one) => this.known.get(one.name).element),
          ),
        ),
      ),
    );
    document.getElementById(focused ?? "")?.focus();
  }
}

// Why a choice cannot run, where another option of it could: what all options share is some other choice's to mend.
const blamed = (option, options) => (option?.problem && options.some((other) => !other.problem) ? option.problem : "");
const reused = (before, one) => (before && before.kind === one.kind ? before : null);

class Slider {
  kind = "slider";

  constructor(one, controls) {
    const id = `control-${one.name}`;
    this.controls = controls;
    this.shown = h("output", { for: id });
    this.input = h("input", {
      id,
      name: one.name,
      type: "range",
      min: 0,
      step: 1,
      oninput: () => this.moved(),
      onchange: () => this.left(),
      "aria-describedby": `${id}-why`,
    });
    this.ticks = h("span", { class: "ticks", "aria-hidden": "true" });
    this.why = h("span", { class: "why", id: `${id}-why` });
    this.element = h(
      "div",
      { class: "control" },
      h("label", { for: id }, one.label),
      this.shown,
      this.input,
      this.ticks,
      this.why,
    );
  }

  update(one) {
    this.one = one;
    this.options = one.options;
    this.input.max = this.options.length - 1;
    this.input.value = Math.max(
      0,
      this.options.findIndex((option) => option.value === one.value),
    );
    this.ticks.replaceChildren(...this.options.map((option) => h("i", { class: option.problem ? "cannot" : "" })));
    this.say();
  }

  say() {
    const option = this.options[this.input.value];
    this.shown.value = option.value;
    this.why.textContent = blamed(option, this.options);
    this.element.classList.toggle("illegal", this.why.textContent !== "");
    this.input.setAttribute(
      "aria-valuetext",
      option.problem ? `${option.value}: cannot run, ${option.problem}` : option.value,
    );
  }

  // While it is dragged the options stay as they were: each is a change of the state that the drag began with.
  moved() {
    this.controls.dragged = this.one.name;
    this.say();
    this.controls.go(this.options[this.input.value].edit, { dragging: true });
  }

  left() {
    this.controls.dragged = null;
    this.controls.go(this.options[this.input.value].edit, { push: true });
  }
}

class Select {
  kind = "select";

  constructor(one, controls) {
    const id = `control-${one.name}`;
    this.input = h("select", {
      id,
      name: one.name,
      onchange: () => controls.go(this.options[this.input.selectedIndex].edit, { push: true }),
      "aria-describedby": `${id}-why`,
    });
    this.why = h("span", { class: "why", id: `${id}-why` });
    this.element = h("div", { class: "control" }, h("label", { for: id }, one.label), this.input, this.why);
  }

  update(one) {
    const options = one.options.some((option) => option.value === one.value)
      ? one.options
      : [{ value: one.value, edit: {}, problem: "" }, ...one.options];
    const signature = options.map((option) => option.value + Boolean(option.problem)).join();
    if (signature !== this.signature) {
      this.input.replaceChildren(
        ...options.map((option) =>
          h(
            "option",
            { value: option.value, title: option.problem || option.note },
            option.problem ? `${option.value} (cannot run)` : option.value,
          ),
        ),
      );
    }
    Object.assign(this, { options, signature });
    this.input.value = one.value;
    const chosen = options.find((option) => option.value === one.value);
    this.why.textContent = blamed(chosen, options);
    this.element.classList.toggle("illegal", this.why.textContent !== "");
  }
}

class Checkbox {
  kind = "checkbox";

  constructor(one, controls) {
    const id = `control-${one.name}`;
    this.input = h("input", {
      id,
      name: one.name,
      type: "checkbox",
      onchange: () => controls.go(this.option(this.input.checked).edit, { push: true }),
      "aria-describedby": `${id}-why`,
    });
    this.why = h("span", { class: "why", id: `${id}-why` });
    this.element = h("div", { class: "control" }, h("label", { for: id }, one.label), this.input, this.why);
  }

  option(checked) {
    return this.options.find((option) => option.value === String(checked));
  }

  // An answer that cannot be taken stays where it is, and says why.
  update(one) {
    this.options = one.options;
    this.input.checked = one.value === "true";
    const [own, other] = [this.option(this.input.checked), this.option(!this.input.checked)];
    this.why.textContent = blamed(own, this.options) || (other.problem && !own.problem ? `cannot be ${other.value === "true" ? "on" : "off"}: ${other.problem}` : "");
    this.element.classList.toggle("illegal", Boolean(blamed(own, this.options)));
    this.element.classList.toggle("fixed", this.why.textContent !== "" && !own.problem);
  }
}

const KINDS = { slider: Slider, select: Select, checkbox: Checkbox };
