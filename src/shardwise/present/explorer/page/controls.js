// Sliders, selects and checkboxes. What cannot run stays on them, and says why.

import { h } from "./dom.js";

const GROUPS = { job: "Job", layout: "Layout", model: "Sizes of the model" };

// The form of all choices, updated in place so that a slider keeps the pointer and the focus.
export class Controls {
  constructor(form, go) {
    Object.assign(this, { form, go, byName: new Map(), dragged: null, order: "" });
    form.addEventListener("submit", (event) => event.preventDefault());
  }

  update(controls) {
    const order = controls.map((control) => control.name).join();
    if (order !== this.order) this.build(controls);
    this.order = order;
    for (const control of controls) if (control.name !== this.dragged) this.byName.get(control.name).update(control);
  }

  build(controls) {
    const focused = document.activeElement?.id;
    const before = this.byName;
    this.byName = new Map(
      controls.map((control) => [
        control.name,
        reused(before.get(control.name), control) ?? new KINDS[control.kind](control, this),
      ]),
    );
    const groups = [...new Set(controls.map((control) => control.group))];
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
            controls.filter((control) => control.group === group).map((control) => this.byName.get(control.name).element),
          ),
        ),
      ),
    );
    document.getElementById(focused ?? "")?.focus();
  }
}

// Why a choice cannot run, where another option of it could: what all options share is some other choice's to mend.
const problemToShow = (option, options) => (option?.problem && options.some((other) => !other.problem) ? option.problem : "");
const reused = (before, control) => (before && before.kind === control.kind ? before : null);

class Slider {
  kind = "slider";

  constructor(control, controls) {
    const id = `control-${control.name}`;
    this.controls = controls;
    this.shown = h("output", { for: id });
    this.input = h("input", {
      id,
      name: control.name,
      type: "range",
      min: 0,
      step: 1,
      oninput: () => this.dragged(),
      onchange: () => this.released(),
      "aria-describedby": `${id}-why`,
    });
    this.ticks = h("span", { class: "ticks", "aria-hidden": "true" });
    this.why = h("span", { class: "why", id: `${id}-why` });
    this.element = h(
      "div",
      { class: "control" },
      h("label", { for: id }, control.label),
      this.shown,
      this.input,
      this.ticks,
      this.why,
    );
  }

  update(control) {
    this.control = control;
    this.options = control.options;
    this.input.max = this.options.length - 1;
    this.input.value = Math.max(
      0,
      this.options.findIndex((option) => option.value === control.value),
    );
    this.ticks.replaceChildren(...this.options.map((option) => h("i", { class: option.problem ? "cannot" : "" })));
    this.say();
  }

  say() {
    const option = this.options[this.input.value];
    this.shown.value = option.value;
    this.why.textContent = problemToShow(option, this.options);
    this.element.classList.toggle("illegal", this.why.textContent !== "");
    this.input.setAttribute(
      "aria-valuetext",
      option.problem ? `${option.value}: cannot run, ${option.problem}` : option.value,
    );
  }

  // While it is dragged the options stay as they were: each is a change of the state that the drag began with.
  dragged() {
    this.controls.dragged = this.control.name;
    this.say();
    this.controls.go(this.options[this.input.value].edit, { dragging: true });
  }

  released() {
    this.controls.dragged = null;
    this.controls.go(this.options[this.input.value].edit, { push: true });
  }
}

class Select {
  kind = "select";

  constructor(control, controls) {
    const id = `control-${control.name}`;
    this.input = h("select", {
      id,
      name: control.name,
      onchange: () => controls.go(this.options[this.input.selectedIndex].edit, { push: true }),
      "aria-describedby": `${id}-why`,
    });
    this.why = h("span", { class: "why", id: `${id}-why` });
    this.element = h("div", { class: "control" }, h("label", { for: id }, control.label), this.input, this.why);
  }

  update(control) {
    const options = control.options.some((option) => option.value === control.value)
      ? control.options
      : [{ value: control.value, edit: {}, problem: "" }, ...control.options];
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
    this.input.value = control.value;
    const chosen = options.find((option) => option.value === control.value);
    this.why.textContent = problemToShow(chosen, options);
    this.element.classList.toggle("illegal", this.why.textContent !== "");
  }
}

class Checkbox {
  kind = "checkbox";

  constructor(control, controls) {
    const id = `control-${control.name}`;
    this.input = h("input", {
      id,
      name: control.name,
      type: "checkbox",
      onchange: () => controls.go(this.option(this.input.checked).edit, { push: true }),
      "aria-describedby": `${id}-why`,
    });
    this.why = h("span", { class: "why", id: `${id}-why` });
    this.element = h("div", { class: "control" }, h("label", { for: id }, control.label), this.input, this.why);
  }

  option(checked) {
    return this.options.find((option) => option.value === String(checked));
  }

  // An answer that cannot be taken stays where it is, and says why.
  update(control) {
    this.options = control.options;
    this.input.checked = control.value === "true";
    const [current, other] = [this.option(this.input.checked), this.option(!this.input.checked)];
    const fixed = other.problem && !current.problem ? `cannot be ${other.value === "true" ? "on" : "off"}: ${other.problem}` : "";
    this.why.textContent = problemToShow(current, this.options) || fixed;
    this.element.classList.toggle("illegal", Boolean(problemToShow(current, this.options)));
    this.element.classList.toggle("fixed", this.why.textContent !== "" && !current.problem);
  }
}

const KINDS = { slider: Slider, select: Select, checkbox: Checkbox };
