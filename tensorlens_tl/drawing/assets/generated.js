// Generated text: the token that is pointed at or focused is the question; a click or Enter keeps it. What a picture holds
// is read by the functions of script.js, which comes first.
(() => {
  if (window.tensorlensGenerated) return;
  window.tensorlensGenerated = true;
  const { values, digits } = window.tensorlensPictures;

  const ask = (mark) => {
    const text = mark.closest(".generated");
    const question = Number(mark.dataset.question);
    const width = Number(text.dataset.width);
    const row = values(text).slice(question * width, (question + 1) * width);
    const largest = Math.max(...row.map(Math.abs)) || 1;
    text.querySelectorAll(".t").forEach((token, place) => {
      token.style.background = `rgba(var(--${row[place] >= 0 ? "blue" : "orange"}), ${(0.65 * Math.abs(row[place])) / largest})`;
      token.setAttribute("aria-label", `${token.dataset.name}: ${digits(row[place])}`);
      token.classList.toggle("q", token.dataset.question === mark.dataset.question);
    });
    text.dataset.chosen = question;
    text.querySelector(".out").textContent = text.dataset.facts.split("\n")[question];
  };
  const questioned = (event) => event.target instanceof Element && event.target.closest(".tlens .generated .t[data-question]");
  const preview = (event) => {
    const mark = questioned(event);
    if (mark && !mark.closest(".generated").querySelector('[aria-pressed="true"]')) ask(mark);
  };
  const keep = (mark) => {
    const kept = mark.getAttribute("aria-pressed") === "true";
    mark.closest(".generated").querySelectorAll("[aria-pressed]").forEach((other) => other.setAttribute("aria-pressed", false));
    mark.setAttribute("aria-pressed", !kept);
    ask(mark);
  };
  document.addEventListener("pointerover", preview);
  document.addEventListener("focusin", preview);
  document.addEventListener("click", (event) => {
    const mark = questioned(event);
    if (mark) keep(mark);
  });
  document.addEventListener("keydown", (event) => {
    const mark = (event.key === "Enter" || event.key === " ") && questioned(event);
    if (!mark) return;
    keep(mark);
    event.preventDefault();
  });
})();
