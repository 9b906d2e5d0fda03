"""`osdp doctor`."""

from osdp.cli.exits import FAULT, guarded
from osdp.cli.options import AsJson, Quiet
from osdp.cli.terminal import progress_bar, show


@guarded
def doctor(as_json: AsJson = False, quiet: Quiet = False) -> None:
    """Check this installation and machine. Exits with 1 if planning or training on CPUs does not work."""
    from osdp.cli.reports.doctor import doctor_object, print_doctor
    from osdp.doctor import checks

    found = []
    with progress_bar() as progress:
        for check in checks():
            progress(check.name, 0.0)
            found.append(check)
    show(as_json, doctor_object, print_doctor, found)
    if any(check.is_needed and not check.is_well for check in found):
        raise SystemExit(FAULT)
