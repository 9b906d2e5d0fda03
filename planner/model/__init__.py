"""The model as the planner cuts it: stages, and units that are wrapped together."""
