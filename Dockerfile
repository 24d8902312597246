# One image for the worker, the dispatcher and workflowctl: static binaries, no shell, not root.
#   docker build -t simple-workflow --build-arg VERSION=v0.1.0 .
FROM golang:1.26 AS build
WORKDIR /src
COPY go.mod go.sum go.work go.work.sum ./
COPY cmd/dispatcher/go.mod cmd/dispatcher/go.sum cmd/dispatcher/
RUN go mod download
COPY . .
ARG VERSION=devel
RUN CGO_ENABLED=0 go build -trimpath \
    -ldflags="-s -w -X github.com/simple-workflow/simple-workflow/internal/build.version=${VERSION}" -o /out/ ./cmd/worker ./cmd/workflowctl ./cmd/dispatcher

FROM gcr.io/distroless/static-debian12:nonroot
COPY --from=build /out/ /usr/local/bin/
USER nonroot
ENTRYPOINT ["/usr/local/bin/worker"]
