// Answers of a static build: scripts beside the page, one for each example, in place of a server.

import { edited } from "./query.js";

const element = document.getElementById("build");
// What the build has: its examples, each with the query of its best layout, and its views; null where a server answers.
export const build = element ? JSON.parse(element.textContent) : null;

const UNAVAILABLE = "this state is not in the static build; `shardwise explore` on your machine has every state";
const BEST_ALONE = "the static build simulates the best layout alone; `shardwise explore` on your machine simulates every layout";
const files = new Map(); // promises of an example's answers
const arrived = new Map(); // what a script calls with its answers

if (build) globalThis.shardwiseAnswers = (name, text) => arrived.get(name)?.(text);

const canonical = (query) => query.split("&").sort().join("&");

function exampleOf(query) {
  const parameters = new URLSearchParams(query);
  return build.examples.find(
    ({ model, cluster }) => model === parameters.get("model") && cluster === parameters.get("cluster"),
  );
}

function load(name) {
  if (!files.has(name))
    files.set(
      name,
      new Promise((resolve, reject) => {
        arrived.set(name, (text) => resolve(unpacked(text)));
        const script = document.createElement("script");
        script.src = `answers/${name}.js`;
        script.addEventListener("error", () => reject(new Error(`answers/${name}.js is missing`)));
        document.head.append(script);
      }),
    );
  return files.get(name);
}

async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

// A state as the build has it: without an example the first one, without a layout the best one.
function stateOf(query) {
  const example = query ? exampleOf(query) : build.examples[0];
  if (!example) return null;
  const parameters = new URLSearchParams(query);
  if (parameters.get("layout")) return { example, query };
  const details = Object.fromEntries([...parameters].filter(([key]) => ["view", "term", "target"].includes(key)));
  return { example, query: edited(example.query, details) };
}

async function find(question, query) {
  const state = stateOf(query);
  if (!state) return null;
  const { values, answers } = await load(state.example.name);
  const fields = answers[`${question}?${canonical(state.query)}`];
  if (!fields) return null;
  const value = (place) => (Array.isArray(place) ? place.map((index) => values[index]) : values[place]);
  return Object.fromEntries(Object.entries(fields).map(([name, place]) => [name, value(place)]));
}

// The answer to a question, or why there is none.
export async function staticAnswer(question, query) {
  try {
    return (await find(question, query)) ?? { failed: [question === "timeline" ? BEST_ALONE : UNAVAILABLE] };
  } catch (error) {
    return { failed: [`the static build is not complete: ${error.message}`] };
  }
}

// Whether a state can be shown; what a server answers always can.
export async function isAvailable(question, query) {
  return !build || !(await staticAnswer(question, query)).failed;
}
