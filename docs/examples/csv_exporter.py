"""The loss of every step as a CSV file in the run's folder, as `observe.exporters: [csv]`."""

from trainshed.observe.exporters import EXPORTERS


@EXPORTERS.register("csv")
class CsvExporter:
    """One line per step; `exporters: {csv: {file: losses.csv}}`."""

    def __init__(self, run_folder, file: str = "losses.csv"):
        self.path = run_folder / file

    def __enter__(self):
        new = not self.path.exists()
        self.file = self.path.open("a")
        if new:
            self.file.write("step,loss,lr\n")
        return self

    def __exit__(self, *error):
        self.file.close()

    def __call__(self, event):
        """Write a step; other events are not for a table."""
        if event["kind"] == "step":
            self.file.write(f"{event['step']},{event['loss']},{event['lr']}\n")
            self.file.flush()
