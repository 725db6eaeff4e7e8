// Numbers as `shardwise.values.units` writes them.

const PREFIXES = [
  ["E", 1e18],
  ["P", 1e15],
  ["T", 1e12],
  ["G", 1e9],
  ["M", 1e6],
  ["k", 1e3],
];
const DURATIONS = [
  ["days", 86400],
  ["hours", 3600],
  ["min", 60],
];

// Three significant digits without trailing zeros, as Python's %.3g.
export function digits(value, count = 3) {
  if (value === 0) return "0";
  const exponent = Math.floor(Math.log10(Math.abs(Number(value.toPrecision(count)))));
  if (exponent < -4 || exponent >= count) {
    const [mantissa, power] = value.toExponential(count - 1).split("e");
    const sign = power[0] === "-" ? "-" : "+";
    return `${Number(mantissa)}e${sign}${power.slice(1).padStart(2, "0")}`;
  }
  return String(Number(value.toPrecision(count)));
}

export function quantity(value, unit = "") {
  const prefix = PREFIXES.find(([, scale]) => Math.abs(value) >= scale * 0.9995);
  return (prefix ? `${digits(value / prefix[1])} ${prefix[0]}${unit}` : `${digits(value)} ${unit}`).trim();
}

// Counts of tokens, dollars, days and MWh as `format_count`, `format_usd`, `format_days` and `format_energy` write them.
const COUNTS = [
  ["T", 1e12],
  ["B", 1e9],
  ["M", 1e6],
  ["K", 1e3],
];

export function shortCount(value) {
  const prefix = COUNTS.find(([, scale]) => value >= scale * 0.9995);
  return prefix ? `${digits(value / prefix[1])}${prefix[0]}` : digits(value);
}

export const usd = (value) => `$${value >= 1e3 ? shortCount(value) : digits(value)}`;

export const days = (value) => (value >= 1 ? `${value.toFixed(1)} days` : seconds(value * 86400));

export const energy = (mwh) => quantity(mwh * 1e6, "Wh");

export const bytes = (value) => quantity(value, "B");

export function seconds(value) {
  const long = DURATIONS.find(([, scale]) => value >= 2 * scale);
  if (long) return `${(value / long[1]).toFixed(1)} ${long[0]}`;
  if (value === 0) return "0 s";
  if (value >= 1) return `${digits(value)} s`;
  return value >= 1e-3 ? `${digits(value / 1e-3)} ms` : `${digits(value / 1e-6)} µs`;
}

// What sums in another order differ by is less than a digit: 0.18749999999999994 is 18.8%, as 0.1875 is.
export const percent = (part, places = 1) => `${Number((100 * part).toPrecision(12)).toFixed(places)}%`;

export const count = (value) => Math.round(value).toLocaleString("en-US");

// A value by the unit of its payload.
export function inUnit(value, unit) {
  if (value === null || value === undefined) return "none";
  if (unit === "s") return value < 0 ? `−${seconds(-value)}` : seconds(value);
  if (unit === "%") return percent(value, 2);
  if (unit === "×") return `${digits(value)}×`;
  if (["B", "B/s", "FLOPs", "FLOP/s", "tokens"].includes(unit)) return quantity(value, unit);
  if (unit === "USD") return usd(value);
  if (unit === "days") return days(value);
  if (unit === "MWh") return energy(value);
  if (unit === "tokens/s") return `${count(value)} tokens/s`;
  return Number.isInteger(value) && Math.abs(value) < 1e15 ? count(value) : `${digits(value, 6)} ${unit}`.trim();
}
