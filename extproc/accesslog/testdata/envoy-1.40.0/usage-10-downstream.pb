


edge-1fairlead.downstreamè
å
¦
	127.0.0.1ú¦
	127.0.0.1á½*ñ±²ØÀ„ÜÃ2ß¡:Œ­5B½Ö5JÖñLR™XZ¹WbºõYj
	127.0.0.1›Žr
	127.0.0.1ºªzaŠÊ
¨
fairlead.log—
$
decision1795987697679-007-0001

plan2a2e85f7a0acc72f

reason
weighted
&

request_id1795987697679-007-0001

strategy	dynamic
-
fairlead.peek

modelm

stream 
.
fairlead.served

host127.0.0.1:34587
>
fairlead.steer,
*
hosts!127.0.0.1:34587,127.0.0.1:34587šchat¢
	127.0.0.1ú¦º°•ZÀÒ1795987697679-007-0001è‚ð¬øó€¢ˆ˜http127.0.0.1:40673*/v1/chat/completions2Go-http-client/1.1B	192.0.2.2J1795987697679-007-0001X¿`j&
x-request-id1795987697679-007-0001p²xg"
­¸2via_upstream8y@Þ