// The state, which is the page's address, and questions about it. Only the last of the questions that wait is asked.

import { edited } from "./query.js";
import { build, staticAnswer } from "./static.js";

export class Store {
  constructor(query) {
    this.query = query;
    this.running = new Map();
    this.waiting = new Map();
  }

  // The address with some keys of other values; null takes a key away.
  edited(edit) {
    return edited(this.query, edit);
  }

  // What the page shows now. While a choice is dragged, the address and the history wait until it is released.
  take(query, { push = false, dragging = false } = {}) {
    this.query = query;
    if (dragging || location.search.slice(1) === query) return;
    try {
      history[push ? "pushState" : "replaceState"](null, "", `?${query}`);
    } catch {
      return; // a page from a disk may not have an address of its own in some browsers
    }
  }

  // The answer to a question about a state, or null where a later one took its place.
  ask(question, query) {
    return new Promise((resolve) => {
      this.waiting.get(question)?.resolve(null);
      this.waiting.set(question, { query, resolve });
      if (!this.running.get(question)) this.next(question);
    });
  }

  async next(question) {
    const next = this.waiting.get(question);
    if (!next) return;
    this.waiting.delete(question);
    this.running.set(question, true);
    next.resolve(await answer(question, next.query));
    this.running.set(question, false);
    this.next(question);
  }
}

// What the server says, or the problems that it names.
export async function answer(question, query) {
  if (build) return staticAnswer(question, query);
  try {
    const response = await fetch(`/ask/${question}?${query}`);
    const payload = await response.json();
    return response.ok ? payload : { failed: payload.error.problems };
  } catch {
    return { failed: ["the explorer does not answer; start it again with `shardwise explore`"] };
  }
}
