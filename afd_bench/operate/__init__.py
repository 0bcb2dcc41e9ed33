"""Operating a deployment: dashboards and alerts from one table, and `afd bench operate`.

panels     what the dashboards show: titles and PromQL
alerts     recording rules and alerts
files      the files made from both, for Grafana, Perses, Prometheus and the Helm chart
"""
