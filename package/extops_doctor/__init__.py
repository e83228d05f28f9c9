"""``python -m extops_doctor`` says whether extops fits this machine, also where ``import extops`` fails."""
