"use strict";
(() => {
  const made = (tag, kind, text) => {
    const element = document.createElement(tag);
    element.className = kind;
    element.textContent = text;
    return element;
  };

  // --- commands

  const announced = document.getElementById("announced");
  for (const button of document.querySelectorAll(".copy")) {
    const code = button.previousElementSibling;
    button.hidden = false;
    button.addEventListener("click", async () => {
      const done = await Promise.resolve().then(() => navigator.clipboard.writeText(code.textContent)).then(() => true, () => false);
      if (!done) getSelection().selectAllChildren(code); // without a clipboard the text is ready for the keyboard
      button.textContent = done ? "Copied" : "Selected";
      announced.textContent = done ? "Copied to the clipboard" : "The text is selected";
      setTimeout(() => (button.textContent = "Copy"), 1600);
    });
  }

  // --- the slider: the ranking at any bandwidth, from the values at the swept ones; texts as the page's writer writes them

  const slider = document.getElementById("bandwidth");
  if (!slider) return;
  const sweep = JSON.parse(document.getElementById("values").textContent);
  const list = document.getElementById("ranking");
  const reset = document.getElementById("reset");
  const most = list.children.length;
  const digits = (value) => {
    if (typeof value !== "number") return "\u2013";
    return Math.abs(value) >= 99.95 ? Math.round(value).toLocaleString("en-US") : value.toPrecision(3);
  };
  const rate = (bandwidth) => {
    const bits = 8 * bandwidth;
    const [factor, unit] = [[1e9, "Gbit/s"], [1e6, "Mbit/s"]].find(([least]) => bits >= least) || [1e3, "kbit/s"];
    return `${Number((bits / factor).toPrecision(3))} ${unit}`;
  };
  const between = (line, bandwidth) => {
    const below = line ? sweep.at.findLastIndex((place) => place <= bandwidth) : -1;
    if (below < 0 || typeof line[below] !== "number") return null;
    if (sweep.at[below] === bandwidth) return line[below];
    if (typeof line[below + 1] !== "number") return null;
    const part = Math.log(bandwidth / sweep.at[below]) / Math.log(sweep.at[below + 1] / sweep.at[below]);
    return line[below] * (line[below + 1] / line[below]) ** part;
  };
  const lead = (lines, where) => {
    if (!lines.length) return `At ${where} no strategy has a known speed.`;
    const first = `At ${where}, ${lines[0].strategy} ${sweep.most}: ${digits(lines[0].value)}`;
    if (lines.length === 1) return `${first}.`;
    return `${first}, ${(100 * (lines[0].value / lines[1].value - 1)).toFixed(1)} % more than ${lines[1].strategy}.`;
  };
  const item = (line, best) => {
    const row = made("li", "", "");
    const [bar, speed, step] = [made("i", "", ""), made("span", "speed", digits(line.value)), made("span", "step", digits(line.step === null ? null : 1e3 * line.step))];
    row.dataset.strategy = line.strategy;
    row.style.setProperty("--c", line.color);
    bar.style.setProperty("--part", line.value / best);
    speed.append(made("small", "", "/s"));
    step.append(" ", made("small", "", "ms"));
    row.append(bar, made("span", "who", line.strategy), speed, step);
    return row;
  };
  const show = (bandwidth, place) => {
    const lines = sweep.lines
      .map((line) => ({ ...line, value: between(line.values, bandwidth), step: between(line.step, bandwidth) }))
      .filter((line) => line.value !== null)
      .sort((first, second) => second.value - first.value);
    list.replaceChildren(...lines.slice(0, most).map((line) => item(line, lines[0].value)));
    document.getElementById("bandwidth-text").textContent = rate(bandwidth);
    document.getElementById("lead").textContent = lead(lines, rate(bandwidth));
    slider.setAttribute("aria-valuetext", `${rate(bandwidth)}, fastest: ${lines.length ? lines[0].strategy : "none"}`);
    for (const mark of document.querySelectorAll(".place")) mark.style.setProperty("--place", place / 100);
  };

  const [low, high] = [sweep.at[0], sweep.at[sweep.at.length - 1]];
  const start = Number(slider.dataset.place);
  const at = (place) => low * (high / low) ** (place / 100);
  list.style.minHeight = `${list.getBoundingClientRect().height}px`; // a shorter ranking moves nothing below it
  slider.disabled = false;
  slider.addEventListener("input", () => {
    reset.hidden = false;
    show(at(slider.value / 4), slider.value / 4);
  });
  reset.addEventListener("click", () => {
    slider.value = Math.round(4 * start);
    show(at(start), start);
    reset.hidden = true;
    slider.focus();
  });
})();
