"""Everything that is known becomes one LaunchPlan, purely; `inputs` asks the world for it."""
