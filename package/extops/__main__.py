"""Where the doctor was."""

raise SystemExit("extops: run python -m extops_doctor")
