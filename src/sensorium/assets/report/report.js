// The crosshair of charts, those that are added to the page later included.
{
  const hide = (svg) => {
    svg.parentElement.querySelector(".tip").hidden = true;
    svg.querySelector(".cross").setAttribute("visibility", "hidden");
  };
  const show = (svg, clientX) => {
    const { series } = JSON.parse(svg.dataset.chart);
    const tip = svg.parentElement.querySelector(".tip");
    const cross = svg.querySelector(".cross");
    const line = cross.querySelector("line");
    const box = svg.getBoundingClientRect();
    const x = (clientX - box.left) * svg.viewBox.baseVal.width / box.width;
    const near = series.map((one) => one.points.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a));
    const at = near.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a);
    cross.querySelectorAll("circle").forEach((dot) => dot.remove());
    tip.replaceChildren(Object.assign(document.createElement("b"), { textContent: "step " + at[2] }));
    near.forEach((point, i) => {
      if (point[2] !== at[2]) return;
      const dot = document.createElementNS("http://www.w3.org/2000/svg", "circle");
      dot.setAttribute("cx", point[0]);
      dot.setAttribute("cy", point[1]);
      dot.setAttribute("r", 4);
      dot.setAttribute("class", "c" + series[i].colour);
      cross.append(dot);
      tip.append(Object.assign(document.createElement("div"), { textContent: series[i].name + " " + point[3] }));
    });
    line.setAttribute("x1", at[0]);
    line.setAttribute("x2", at[0]);
    cross.setAttribute("visibility", "visible");
    tip.hidden = false;
    const left = at[0] * box.width / svg.viewBox.baseVal.width;
    tip.style.left = (left > box.width / 2 ? left - tip.offsetWidth - 14 : left + 14) + "px";
  };
  let pointed = null;
  document.addEventListener("pointermove", (event) => {
    const svg = event.target.closest("svg.chart");
    if (pointed !== null && pointed !== svg && pointed.isConnected) hide(pointed);
    pointed = svg;
    if (svg !== null) show(svg, event.clientX);
  });
}
