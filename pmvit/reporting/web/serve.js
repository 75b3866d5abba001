"use strict";

/**
 * @typedef {{name: string, share: number}} Answer
 * @typedef {Object} Result
 * @property {string} picture The image as the models see it.
 * @property {Object<string, number>} seconds By model.
 * @property {number} rounds
 * @property {"classes" | "pixels" | "embedding"} kind
 */

const TITLES = { original: "Original", compressed: "Compressed", difference: "Where they differ" };

/** Sends images to the models and shows what comes back; the last one sent is the one shown. */
class TrialPage {
  constructor() {
    const element = (/** @type {string} */ id) => document.getElementById(id);
    this.drop = element("drop");
    this.file = /** @type {HTMLInputElement} */ (element("file"));
    this.status = element("status");
    this.alert = element("alert");
    this.answers = element("answers");
    this.columns = element("columns");
    this.verdict = element("verdict");
    this.classes = element("classes");
    this.sent = 0;
    const data = element("viewer-data");
    this.viewer = data === null ? null : new BlockViewer(element("viewer"), JSON.parse(data.textContent));
    this.file.addEventListener("change", () => this.send(this.file.files[0]));
    document.addEventListener("paste", (event) => this.send(event.clipboardData?.files[0]));
    for (const kind of ["dragenter", "dragover"]) {
      document.addEventListener(kind, (event) => {
        event.preventDefault();
        this.drop.classList.add("over");
      });
    }
    document.addEventListener("dragleave", () => this.drop.classList.remove("over"));
    document.addEventListener("drop", (event) => {
      event.preventDefault();
      this.drop.classList.remove("over");
      this.send(event.dataTransfer.files[0]);
    });
  }

  /** @param {File | undefined} file */
  async send(file) {
    if (file === undefined) return;
    this.sent += 1;
    const number = this.sent;
    this.alert.hidden = true;
    this.status.textContent = `${file.name} is on its way through both models`;
    const megabytes = Number(this.file.dataset.megabytes);
    if (file.size > 1e6 * megabytes) {
      this.refuse(`The file is larger than ${megabytes} MB: send a smaller one.`);
      this.file.value = "";
      return;
    }
    let answer;
    try {
      const response = await fetch("predict", { method: "POST", body: file, headers: { "Content-Type": "application/octet-stream" } });
      answer = await response.json();
    } catch {
      answer = { error: "The server does not answer: was it ended?" };
    }
    if (number !== this.sent) return;
    if (answer.error) this.refuse(answer.error);
    else this.show(file.name, answer);
    this.file.value = "";
  }

  /**
   * Says why there is no answer; those of the image before would be taken for it.
   * @param {string} message
   */
  refuse(message) {
    this.answers.hidden = true;
    this.status.textContent = "";
    this.alert.textContent = message;
    this.alert.hidden = false;
  }

  /** @param {string} name @param {Result & Object<string, any>} result */
  show(name, result) {
    this.status.textContent = name;
    this.answers.hidden = false;
    this.verdict.textContent = verdictOf(result);
    this.classes.hidden = result.kind !== "pixels";
    this.columns.replaceChildren();
    for (const side of ["original", "compressed", ...(result.kind === "pixels" ? ["difference"] : [])]) {
      const column = document.createElement("div");
      column.append(made("h3", TITLES[side]));
      if (side !== "difference") column.append(made("p", timeOf(result.seconds, side), "time"));
      if (result.kind === "classes") column.append(listOf(result[side]));
      if (result.kind === "pixels") column.append(pictureOf(result[side], TITLES[side]));
      this.columns.append(column);
    }
    if (result.kind === "pixels") this.classes.replaceChildren(...result.classes.map(entryOf));
    if (this.viewer !== null) {
      const picture = { src: result.picture, caption: name, blocks: result.blocks };
      if (result.kind === "classes") Object.assign(picture, { original: result.original[0], compressed: result.compressed[0] });
      this.viewer.showPicture(this.viewer.add(picture));
    }
  }
}

/** @param {string} tag @param {string} text @param {string} [name] */
function made(tag, text, name) {
  const element = document.createElement(tag);
  element.textContent = text;
  if (name) element.className = name;
  return element;
}

/** @param {Result & Object<string, any>} result */
function verdictOf(result) {
  const faster = result.seconds.original / (result.seconds.optimized ?? result.seconds.compressed);
  const speed = `The compressed model is ${faster.toFixed(2)} times as fast on this image.`;
  if (result.kind === "pixels") return `They agree on ${(100 * result.agreement).toFixed(1)} % of the pixels. ${speed}`;
  if (result.kind === "embedding") return `The cosine between their outputs is ${result.cosine.toFixed(4)}. ${speed}`;
  return `${result.same ? "Both give the same answer." : "They give different answers."} ${speed}`;
}

/** @param {Object<string, number>} seconds @param {string} side */
function timeOf(seconds, side) {
  const text = (/** @type {number} */ value) => `${(1e3 * value).toFixed(1)} ms`;
  const optimized = side === "compressed" && seconds.optimized ? `; ${text(seconds.optimized)} optimised for inference` : "";
  return text(seconds[side]) + optimized;
}

/** @param {Answer[]} answers */
function listOf(answers) {
  const list = document.createElement("ol");
  for (const answer of answers) {
    const item = document.createElement("li");
    const meter = document.createElement("meter");
    meter.value = answer.share;
    meter.setAttribute("aria-hidden", "true");
    item.append(made("span", answer.name), made("span", `${(100 * answer.share).toFixed(1)} %`, "share"), meter);
    list.append(item);
  }
  return list;
}

/** @param {string} src @param {string} alt */
function pictureOf(src, alt) {
  const image = document.createElement("img");
  image.src = src;
  image.alt = alt;
  return image;
}

/** @param {{name: string, colour: number[]}} entry */
function entryOf(entry) {
  const item = document.createElement("li");
  const swatch = document.createElement("span");
  swatch.className = "swatch";
  swatch.style.background = `rgb(${entry.colour.join(" ")})`;
  item.append(swatch, entry.name);
  return item;
}

new TrialPage();
