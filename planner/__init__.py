"""Offline: model.yaml -> Trace -> Calibration -> Problem -> Solution -> Plan (docs/design.md is the map)."""
