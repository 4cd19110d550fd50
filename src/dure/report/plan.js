"use strict";
(() => {
  const values = JSON.parse(document.getElementById("values").textContent);
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const made = (tag, kind, text) => {
    const element = document.createElement(tag);
    element.className = kind;
    element.textContent = text;
    return element;
  };

  // --- texts, as the page's writer writes them

  const digits = (value) => {
    if (typeof value !== "number") return "\u2013";
    if (Math.abs(value) >= 99.95) return Math.round(value).toLocaleString("en-US");
    return value.toPrecision(3);
  };
  const rate = (bandwidth) => {
    const bits = 8 * bandwidth;
    const [factor, unit] = [[1e9, "Gbit/s"], [1e6, "Mbit/s"]].find(([least]) => bits >= least) || [1e3, "kbit/s"];
    return `${Number((bits / factor).toPrecision(3))} ${unit}`;
  };

  // --- commands

  const said = document.getElementById("said");
  const copied = async (text) => {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      return false;
    }
  };
  for (const button of all(".copy")) {
    const code = button.previousElementSibling;
    button.hidden = false;
    button.addEventListener("click", async () => {
      const done = await copied(code.textContent);
      if (!done) getSelection().selectAllChildren(code); // without a clipboard the text is ready for the keyboard
      button.textContent = done ? "Copied" : "Selected";
      said.textContent = done ? "Copied to the clipboard" : "The text is selected";
      setTimeout(() => (button.textContent = "Copy"), 1600);
    });
  }

  // --- one strategy above the others

  const sweeps = document.querySelector(".sweeps");
  const hold = (strategy) => {
    if (!sweeps) return;
    sweeps.classList.toggle("dimmed", strategy !== null);
    for (const line of all(".line", sweeps)) line.classList.toggle("held", line.dataset.strategy === strategy);
  };
  const pressed = () => sweeps.querySelector("button[aria-pressed=true]")?.dataset.strategy ?? null;
  for (const button of all(".sweeps .legend button")) {
    button.disabled = false;
    button.addEventListener("click", () => {
      const on = button.getAttribute("aria-pressed") !== "true";
      for (const each of all(".sweeps .legend button")) each.setAttribute("aria-pressed", String(on && each === button));
      hold(pressed());
    });
  }
  for (const item of all(".sweeps .legend button, #ranking li")) {
    item.addEventListener("pointerenter", () => hold(item.dataset.strategy));
    item.addEventListener("pointerleave", () => hold(pressed()));
  }

  // --- values at a place of a chart, by pointer or by arrow keys

  const MOST_READ = 7;
  for (const figure of all(".chart[data-axis]")) {
    const sweep = values[figure.dataset.axis];
    for (const side of all("[data-measure]", figure)) readable(sweep, side.dataset.measure, side.querySelector(".plot"));
  }

  function readable(sweep, measure, plot) {
    const readout = made("div", "readout", "");
    const cursor = plot.querySelector(".cursor");
    let index = null;
    readout.hidden = true;
    plot.tabIndex = 0;
    plot.setAttribute("aria-label", `${plot.getAttribute("aria-label")} Arrow keys read the values.`);
    plot.append(readout);
    const hide = () => {
      readout.hidden = cursor.hidden = true;
      index = null;
    };
    const show = (next, aloud) => {
      if (next === index) return;
      index = next;
      const place = sweep.places[index];
      const found = sweep.lines
        .map((line) => [line, line[measure][index]])
        .filter(([, value]) => typeof value === "number")
        .sort(([, first], [, second]) => (measure === "step" ? first - second : second - first))
        .slice(0, MOST_READ)
        .map(([line, value]) => [line, measure === "step" ? `${digits(1e3 * value)} ms` : `${digits(value)}/s`]);
      readout.replaceChildren(made("p", "", sweep.texts[index]));
      for (const [line, text] of found) {
        const row = made("div", line.look, "");
        const dot = made("span", "block", "");
        dot.style.cssText = "width: 9px; height: 9px; background: var(--c)";
        row.append(dot, made("span", "", line.strategy), made("b", "", text));
        readout.append(row);
      }
      cursor.style.left = `${place}%`;
      readout.style.left = place > 50 ? "auto" : `calc(${place}% + 9px)`;
      readout.style.right = place > 50 ? `calc(${100 - place}% + 9px)` : "auto";
      readout.hidden = cursor.hidden = false;
      if (aloud) said.textContent = `${sweep.texts[index]}: ${found.map(([line, text]) => `${line.strategy} ${text}`).join(", ")}`;
    };
    plot.addEventListener("pointermove", (event) => {
      const box = plot.getBoundingClientRect();
      const place = (100 * (event.clientX - box.left)) / box.width;
      const away = sweep.places.map((each) => Math.abs(each - place));
      show(away.indexOf(Math.min(...away)), false);
    });
    plot.addEventListener("pointerleave", hide);
    plot.addEventListener("blur", hide);
    plot.addEventListener("keydown", (event) => {
      const last = sweep.places.length - 1;
      const from = index ?? -1;
      const next = { ArrowRight: Math.min(from + 1, last), ArrowLeft: Math.max(from - 1, 0), Home: 0, End: last }[event.key];
      if (event.key === "Escape") hide();
      if (next === undefined) return;
      event.preventDefault();
      show(next, true);
    });
  }

  // --- the slider: the ranking at any bandwidth, from the values at the swept ones

  const slider = document.getElementById("bandwidth");
  if (!slider) return;
  const sweep = values.bandwidth;
  const list = document.getElementById("ranking");
  const most = list.children.length;
  const reset = document.getElementById("reset");
  const calm = matchMedia("(prefers-reduced-motion: reduce)");
  const items = new Map(all("li", list).map((item) => [item.dataset.strategy, item]));

  const between = (line, bandwidth) => {
    const below = !line ? -1 : sweep.at.findLastIndex((place) => place <= bandwidth);
    if (below < 0 || typeof line[below] !== "number") return null;
    if (sweep.at[below] === bandwidth) return line[below];
    if (typeof line[below + 1] !== "number") return null;
    const part = Math.log(bandwidth / sweep.at[below]) / Math.log(sweep.at[below + 1] / sweep.at[below]);
    return line[below] * (line[below + 1] / line[below]) ** part;
  };
  const ranked = (bandwidth) =>
    sweep.lines
      .map((line) => ({ ...line, value: between(line[sweep.by], bandwidth), step: between(line.step, bandwidth) }))
      .filter((line) => line.value !== null)
      .sort((first, second) => second.value - first.value);
  const item = (line) => {
    const row = made("li", line.look, "");
    row.dataset.strategy = line.strategy;
    row.append(made("i", "", ""), made("span", "who", line.strategy), made("span", "speed", ""), made("span", "step", ""));
    row.addEventListener("pointerenter", () => hold(line.strategy));
    row.addEventListener("pointerleave", () => hold(pressed()));
    items.set(line.strategy, row);
    return row;
  };
  const order = (shown) => {
    const now = [...list.children];
    if (now.length === shown.length && now.every((each, place) => each === shown[place])) return;
    const before = new Map(now.map((each) => [each, each.getBoundingClientRect().top]));
    list.replaceChildren(...shown);
    if (calm.matches) return;
    for (const each of shown) {
      for (const running of each.getAnimations()) running.cancel();
      const moved = before.has(each) ? before.get(each) - each.getBoundingClientRect().top : 0;
      if (moved) each.animate([{ transform: `translateY(${moved}px)` }, { transform: "none" }], { duration: 160, easing: "ease-out" });
    }
  };
  const lead = (lines, where) => {
    if (!lines.length) return `At ${where} no strategy has a known speed.`;
    const first = `At ${where}, ${lines[0].strategy} ${sweep.most}: ${digits(lines[0].value)}`;
    if (lines.length === 1) return `${first}.`;
    return `${first}, ${(100 * (lines[0].value / lines[1].value - 1)).toFixed(1)} % more than ${lines[1].strategy}.`;
  };
  const show = (bandwidth, place) => {
    const lines = ranked(bandwidth);
    const shown = lines.slice(0, most).map((line) => {
      const element = items.get(line.strategy) ?? item(line);
      element.querySelector("i").style.setProperty("--part", line.value / lines[0].value);
      element.querySelector(".speed").replaceChildren(digits(line.value), made("small", "", "/s"));
      element.querySelector(".step").replaceChildren(`${digits(line.step === null ? null : 1e3 * line.step)} `, made("small", "", "ms"));
      return element;
    });
    order(shown);
    document.getElementById("bandwidth-text").textContent = rate(bandwidth);
    document.getElementById("lead").textContent = lead(lines, rate(bandwidth));
    slider.setAttribute("aria-valuetext", `${rate(bandwidth)}, fastest: ${lines.length ? lines[0].strategy : "none"}`);
    for (const mark of all(".place")) mark.style.left = `${place}%`;
  };

  const low = sweep.at[0];
  const high = sweep.at[sweep.at.length - 1];
  const start = Number(slider.dataset.place);
  const at = (place) => low * (high / low) ** (place / 100);
  list.style.minHeight = `${list.getBoundingClientRect().height}px`; // a shorter ranking moves nothing below it
  slider.disabled = false;
  slider.addEventListener("input", () => {
    const place = slider.value / 4;
    reset.hidden = false;
    show(at(place), place);
  });
  reset.addEventListener("click", () => {
    slider.value = Math.round(4 * start);
    show(at(start), start);
    reset.hidden = true;
    slider.focus();
  });
})();
